"""Any task of reasoning-gym. Each prompt is a new problem, without end, as hard as its row says.

    pip install reasoning-gym
    for level in 0 1 2; do echo "{\\"level\\": $level, \\"data_source\\": \\"chain_sum/$level\\"}"; done > levels.jsonl
    torchrun --standalone --nproc-per-node 2 train_async.py --model Qwen/Qwen3-0.6B --env reasoning-gym:chain_sum \\
        --train-files levels.jsonl --val-files levels.jsonl --max-prompt-length 256 --max-response-length 512

| column | meaning |
|---|---|
| `level` | of the package's curriculum for the task: 0 is the easiest; beyond the last it stays the hardest |
| `config` | fields of the task's configuration, such as {"min_terms": 2, "max_terms": 3} |
| `prompt` | messages before the problem |

The score is the package's own, of the text in <answer> tags if there are any, else of all that follows a thought. The same
row has another problem each time, the same in each validation. Left out: a level that rises with the score; the fork
greso (docs/algorithms.md) passes over rows that are too easy or too hard.
"""

import reasoning_gym
from reasoning_gym.factory import DATASETS, create_curriculum
from reasoning_gym.utils import extract_answer

from rl.errors import UserError


class Problem:
    """A problem of a task, answered in one turn."""

    task = ""

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Draw the problem, the same for all responses to a prompt."""
        config = {name: value for name, value in (row.get("config") or {}).items() if value is not None}
        if row.get("level") is not None:
            curriculum = create_curriculum(self.task)
            curriculum.set_global_level(row["level"])
            config = vars(curriculum.generate_configuration()) | config
        self.problems = reasoning_gym.create_dataset(self.task, **config | {"seed": seed % 2**31, "size": 1})
        self.problem = self.problems[0]
        return [{"role": "user", "content": self.problem["question"]}]

    def step(self, message: dict) -> tuple[list[dict], float, bool]:
        """Score the answer."""
        said = message["content"]
        answer = extract_answer(said) or said.rpartition("</think>")[2].strip()
        return [], self.problems.score_answer(answer, self.problem), True


def from_name(task: str) -> list[type]:
    """Return the class of a task's problems. Raise UserError if there is no such task."""
    if task not in DATASETS:
        raise UserError(f"reasoning-gym has no task {task!r}. Take one of {', '.join(sorted(DATASETS))}.")
    return [type(task, (Problem,), {"task": task})]

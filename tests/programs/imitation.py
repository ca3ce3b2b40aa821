"""Started by test_forking.py with the fork imitation: prints how far, relatively, what its term adds to each update's gradient
is from the coefficient times transformers' gradient of the same conversations, and the same of the metric.

python imitation.py OUT
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from helpers import flat_gradient, make_demonstrations, make_group, padded_loss, relative, save_model
from rl.algorithm.imitation import Imitation

import train_async
import train_one_step_off
import train_sync
from rl import parts
from rl.learning.batch import Batch
from rl.learning.division import Division
from rl.learning.learner import Learner
from rl.ranks import process
from rl.ranks.timers import Timers

COEF, SIZE = 0.3, 3
ROWS = make_demonstrations(1, 2, 3, 2, 1, 1, 2)


def gradients(script, path: str, ranks, **flags) -> tuple[list, dict[str, float]]:
    """The gradient of each update of step 3, the weights staying what they are, and the step's metrics."""
    args = parts.make(script.Args, train_batch_size=4, ppo_mini_batch_size=2, rollout_n=3, **flags)
    learner, found = Learner(path, args.learner, ranks, 10), []
    learner.imitation = Imitation(args, ROWS)
    learner.steps = 2

    def step() -> dict[str, float]:
        found.append(flat_gradient(learner.policy).double())
        learner.optimizer.zero_grad()
        return {"actor/grad_norm": 0.0, "actor/lr": 0.0, "actor/skipped_steps": 0}

    learner.step = step
    batch = Batch.of([make_group(ticket, (5, 3, 7)) for ticket in range(4)], Division.of(args, learner))
    return found, script.learn(args, learner, batch, Timers())


def main(ranks) -> None:
    path, errors = save_model("qwen2-untied", Path(sys.argv[1]) / "model"), []
    for script in (train_sync, train_one_step_off, train_async):
        for tokens in (22, 8192):  # one row after the other, or all together
            flags = {"max_tokens_per_micro_batch": tokens, "max_prompt_length": 14, "max_response_length": 8}
            sft = {"sft_files": ("demo",), "sft_coef": COEF, "sft_batch_size": SIZE}
            alone, plain = gradients(script, path, ranks, **flags)
            mixed, metrics = gradients(script, path, ranks, **flags, **sft)
            order = Imitation(parts.make(script.Args, **flags, **sft), ROWS).order
            losses = []
            for update in range(2):  # steps 1 and 2 have taken two times two updates' rows
                first = (2 * 2 + update) * SIZE
                loss, expected = padded_loss(path, [ROWS[order(ticket)[1]] for ticket in range(first, first + SIZE)])
                losses.append(loss)
                errors.append(relative(mixed[update] - alone[update], COEF * expected))
            errors.append(abs(metrics.pop("actor/sft_nll") / (sum(losses) / 2) - 1))
            assert metrics == plain, "nothing that is reported of the samples counts them"
    print(json.dumps(errors))


process.run(main)

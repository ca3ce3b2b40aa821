"""Environments of GEM: game:Minesweeper-v0-easy, rg:letter_counting and so on.

    pip install gem-llm
    for game in $(seq 64); do echo "{\\"data_source\\": \\"guess\\", \\"game\\": $game}"; done > games.jsonl
    torchrun --standalone --nproc-per-node 2 train_async.py --model Qwen/Qwen3-0.6B --env gem:game:GuessTheNumber-v0-easy \\
        --train-files games.jsonl --val-files games.jsonl --max-turns 20 --max-prompt-length 512 --max-response-length 2048

The rows need no column: the environment draws the problem, the same for all responses to a prompt. The score is the sum of its
rewards. Left out: GEM's wrappers, as --tools and the conversation replace them. `math:`, `code:` and `qa:` load data from the
hub, once for each episode: give such data to --train-files instead.
"""

import gem
from gem.envs.registration import ENV_REGISTRY

from rl.errors import UserError


class Episode:
    """An episode of an environment."""

    name = ""

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Begin it."""
        self.env = gem.make(self.name)
        return _told(*self.env.reset(seed=seed % 2**31))

    def step(self, message: dict) -> tuple[list[dict], float, bool]:
        """Answer the model."""
        observation, reward, terminated, truncated, info = self.env.step(message["content"])
        done = terminated or truncated
        return [] if done else _told(observation, info), reward, done


def _told(observation: str, info: dict) -> list[dict]:
    return [{"role": "user", "content": "\n".join(filter(None, [observation, info.get("suffix")]))}]


def from_name(name: str) -> list[type]:
    """Return the class of an environment's episodes. Raise UserError if there is no such environment."""
    if name not in ENV_REGISTRY:
        raise UserError(f"GEM has no environment {name!r}. Take one of {', '.join(ENV_REGISTRY)}.")
    return [type(name, (Episode,), {"name": name})]

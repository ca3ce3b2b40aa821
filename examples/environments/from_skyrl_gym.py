"""Environments of SkyRL-gym: gsm8k, gsm8k_multi_turn, aime, lcb, search, searchcode, text2sql, and those that you register.

    pip install skyrl-gym
    torchrun --standalone --nproc-per-node 2 train_async.py --model Qwen/Qwen3-0.6B --env skyrl-gym:gsm8k_multi_turn \\
        --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet --max-turns 5 --max-prompt-length 512 \\
        --max-response-length 2048

`--env skyrl-gym:my_package.my_env:MyEnv` takes your own class. The environment gets the row's columns as `extras`, with
`reward_spec` made of the row's ground truth if it has none, so that verl's data works as SkyRL's does. A
column `env_config` has the settings that search and text2sql need. Left out: an `init` that changes the prompt instead of
adding to it.
"""

from types import SimpleNamespace

import skyrl_gym

from rl.errors import UserError
from user_processes.programs import BadValue


class Episode:
    """An episode of an environment."""

    name = ""

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Make the environment, and let it add to the prompt."""
        extras = {"reward_spec": {"ground_truth": row.get("ground_truth")}} | row
        self.env = skyrl_gym.make(self.name, env_config=SimpleNamespace(**(row.get("env_config") or {})), extras=extras)
        prompt = row.get("prompt") or []
        told, _ = self.env.init(list(prompt))
        if told[: len(prompt)] != prompt:
            raise BadValue(f"init of {self.name} has changed the row's prompt: here it can only add messages")
        return told[len(prompt) :]

    def step(self, message: dict) -> tuple[list[dict], float, bool]:
        """Answer the model."""
        answer = self.env.step(message["content"])
        return answer["observations"], answer["reward"], answer["done"]


def from_name(name: str) -> list[type]:
    """Return the class of an environment's episodes. Raise UserError if there is no such environment."""
    if ":" in name:
        skyrl_gym.register(id=name, entry_point=name)
    if name not in skyrl_gym.registry:
        known = ", ".join(skyrl_gym.registry)
        raise UserError(
            f"SkyRL-gym has no environment {name!r}. Take one of {known}, or name your class as package.file:Class."
        )
    return [type(name, (Episode,), {"name": name})]

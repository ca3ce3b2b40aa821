"""Reward functions in TRL's form, over live environments: --reward file.py:function whose signature names `environments` or
`completions`.

TRL calls them with lists over a batch. Here a response's environment lives in the response's own process, so each function is
called there, when the response has ended, with lists of one. Left out: functions that compare responses, and `trainer_state`.
"""

from collections.abc import Callable
from typing import Any

from rl.environments.observation import BadValue
from rl.environments.programs import accepted, as_reward, awaited

NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class Transcript:
    """What was said in an episode, in TRL's form."""

    def __init__(self, row: dict, added: list[dict] | str):
        """added: by reset."""
        self.row = row
        self.prompt = row.get("prompt") or []
        if isinstance(self.prompt, list):
            self.prompt = _with_added(self.prompt, added)
        self.completion: list[dict] = []
        self.ids: list[int] = []

    def say(self, message: dict) -> None:
        """Add a turn of the model: {role, content, calls}."""
        calls = [{"type": "function", "function": call} for call in message["calls"] if isinstance(call, dict)]
        said = {"role": "assistant", "content": message["content"]}
        self.completion.append(said | ({"tool_calls": calls} if calls else {}))

    def as_batch(self, instance: Any) -> dict[str, list]:
        """Return the keywords of a reward function, lists of one. instance: the environment; None for functions as tools."""
        columns = {name: [value] for name, value in self.row.items() if name not in NOT_COLUMNS}
        said = {"prompts": [self.prompt], "completions": [self.completion], "completion_ids": [self.ids]}
        ignored = dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)
        return columns | said | ignored | ({} if instance is None else {"environments": [instance]})


def _with_added(prompt: list[dict], added: list[dict] | str) -> list[dict]:
    if not isinstance(added, str):
        return [*prompt, *added]
    *before, last = prompt or [{"role": "user", "content": ""}]
    return [*before, last | {"content": last["content"] + added}]


def score(functions: list[Callable], transcript: Transcript, instance: Any, own: float | None) -> float:
    """Return the sum of the functions' rewards and the environment's own one. A reward of None does not count. Raise BadValue
    if none counts."""
    batch = transcript.as_batch(instance)
    rewards = [own, *(_reward(function, batch) for function in functions)]
    counted = [reward for reward in rewards if reward is not None]
    if not counted:
        raise BadValue("no reward function has scored the response: each returned None")
    return sum(counted)


def _reward(function: Callable, batch: dict[str, list]) -> float | None:
    values = awaited(function(**accepted(function, batch)))
    try:
        (value,) = values
    except (TypeError, ValueError):
        name = getattr(function, "__name__", "the reward function")
        raise BadValue(f"{name} returned {values!r:.100}, not a list of one reward: it is called for one response") from None
    return as_reward(value)

"""A response's score, or the event that kept it from being scored."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rl.printable import one_line
from rl.ranges import LARGEST_FLOAT

OUT = "outage"  # of a grader (rl/rewards/outages.py)
EVENTS = ("timeout", "error", "bad_value", "died", "image", OUT)  # image: an image of the prompt is damaged


@dataclass(frozen=True)
class Score:
    score: float | None  # None if an event kept the response from being scored
    extra: dict[str, float] = field(default_factory=dict)
    event: str | None = None  # one of EVENTS
    message: str = ""  # of the event
    pred: str | None = None  # the answer that the grader found, for the majority vote of a validation

    @property
    def error(self) -> str | None:
        """The event with its message; None without an event."""
        return f"{self.event}: {self.message}" if self.event else None


GREEDY = "the greedy response: "  # begins the error of responses whose baseline could not be scored


def event_of(error: str) -> str:
    """Return the event of a response's error (`Score.error`)."""
    return error.removeprefix(GREEDY).partition(":")[0]


class ScoringEvents:
    """The number of responses that could not be scored so far, by kind: those of the steps, and those of validations."""

    def __init__(self):
        self._counts: Counter[str] = Counter()

    def add(self, errors: Iterable[str]) -> None:
        """Count the responses with these errors (`Score.error`)."""
        self._counts.update(map(event_of, errors))

    def metrics(self) -> dict[str, int]:
        return {f"reward/events/{kind}": self._counts[kind] for kind in EVENTS}

    def state(self) -> dict[str, int]:
        return dict(self._counts)

    def restore(self, state: dict[str, int]) -> None:
        self._counts = Counter(state)


def as_score(value: Any) -> Score:
    """Return a reward function's return value as a Score; anything but a finite fp32 number is a bad_value event."""
    is_dict = isinstance(value, dict)
    score = value.get("score") if is_dict else value
    if not (_is_number(score) and abs(score) <= LARGEST_FLOAT):
        fault = 'which has no finite number under "score"' if is_dict else "not a finite number of fp32"
        return Score(None, event="bad_value", message=one_line(f"the reward function returned {value!r:.100}, {fault}"))
    extra = {name: float(its) for name, its in value.items() if name != "score" and _is_number(its)} if is_dict else {}
    pred = value.get("pred") if is_dict else None
    return Score(float(score), extra, pred=None if pred is None else " ".join(str(pred).split()))


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def overlong_penalty(length: int, max_response_length: int, buffer_len: int, factor: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in [-factor, 0]: 0 up to max_response_length -
    buffer_len tokens, falling linearly from there."""
    if buffer_len <= 0:
        return 0.0
    over = length - (max_response_length - buffer_len)
    return min(-over / buffer_len * factor, 0.0)

"""What a reward function is given and returns: its value as a `Score`, or the event that kept a response from being scored; and
the penalty on length."""

import math
from dataclasses import dataclass, field
from typing import Any

from rl.printable import one_line
from rl.ranges import LARGEST_FLOAT

EVENTS = ("timeout", "error", "bad_value", "died", "image")  # image: the prompt's is damaged (rl/generation/generator.py)


@dataclass(frozen=True)
class Score:
    score: float | None  # None if an event kept the response from being scored
    extra: dict[str, float] = field(default_factory=dict)
    event: str | None = None  # one of EVENTS
    message: str = ""  # how it came to the event

    @property
    def error(self) -> str | None:
        """The event in words; None if there was none."""
        return f"{self.event}: {self.message}" if self.event else None


def as_score(value: Any) -> Score:
    """The return value of a reward function as a Score; anything but a finite number of fp32 is a bad_value event."""
    score, extra = value, {}
    if isinstance(value, dict):
        extra = {k: float(v) for k, v in value.items() if k != "score" and _is_number(v)}
        score = value.get("score")
    if not (_is_number(score) and abs(score) <= LARGEST_FLOAT):
        wanted = 'which has no finite number under "score"' if isinstance(value, dict) else "not a finite number"
        wanted += " of fp32"
        return Score(None, event="bad_value", message=one_line(f"the reward function returned {value!r:.100}, {wanted}"))
    return Score(float(score), extra)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def of_reply(reply: dict, too_late: str) -> Score:
    """The Score in an async function's reply (rl/rewards/worker.py). too_late: the message of one that took too long."""
    if "failed" not in reply:
        return as_score(reply["value"])
    event = reply["event"] if reply["event"] in EVENTS else "error"
    return Score(None, event=event, message=too_late if event == "timeout" else f"{reply['failed']:.500}")


def plain(value: Any) -> Any:
    """numpy scalars and arrays, bytes and dates of a parquet row, as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def overlong_penalty(length: int, max_response_length: int, buffer_len: int, factor: float) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13), in [-factor, 0]: 0 up to max_response_length - buffer_len tokens,
    then falling linearly."""
    if buffer_len <= 0:
        return 0.0
    over = length - (max_response_length - buffer_len)
    return min(-over / buffer_len * factor, 0.0)

"""The seconds that each part of a run takes: what the simulation of rl/plan/simulation.py is driven by.

They come from a measurement (rl/plan/calibrate.py), from a finished run (rl/plan/from_run.py) or from FLOPs and bandwidths
(rl/plan/roofline.py), and are kept as JSON.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl.errors import UserError


@dataclass(frozen=True)
class EngineTimes:
    """One engine. A decode step samples a token for each running response; it takes

        rows(running) + context_token * tokens of context that the step reads

    Where `padded`, each response reads as many tokens as the longest one (the embedded engine's rectangle)."""

    running: tuple[int, ...]  # where `seconds` are known, rising; between them they are linear
    seconds: tuple[float, ...]  # of a decode step with this many running responses, without their context
    context_token: float = 0.0
    padded: bool = False
    prefill: float = 0.0  # seconds of a step's prefill, however small
    prefill_token: float = 0.0  # seconds more for each prompt token; the responses of a group share their prompt
    prefill_row: float = 0.0  # seconds more for each response that starts
    finish: float = 0.0  # seconds more for each response that ends: text, score, record
    receive: float = 0.0  # seconds without decoding that new weights take
    score: float = 0.0  # seconds that a scoring process works on a response
    score_workers: int = 1  # scoring processes of the engine

    def rows(self, most: int) -> list[float]:
        """Seconds of a decode step with 0, 1, ..., `most` running responses, without their context."""
        return [0.0, *(_linear(self.running, self.seconds, n) for n in range(1, most + 1))]


@dataclass(frozen=True)
class LearnerTimes:
    """All learners together: a step of T distinct tokens and U updates on L ranks takes

    step + U * update + (T * token + sum of squared lengths * square) / L
    """

    step: float = 0.0
    update: float = 0.0
    token: float = 0.0  # rank-seconds; a token of a prompt counts once for the whole group
    square: float = 0.0  # rank-seconds for each token and token before it: attention
    publish: float = 0.0  # seconds that a publish keeps the learners from training

    def learn(self, tokens: int, squares: float, updates: int, ranks: int) -> float:
        return self.step + updates * self.update + (tokens * self.token + squares * self.square) / ranks


@dataclass(frozen=True)
class ServiceTimes:
    engine: EngineTimes
    learner: LearnerTimes
    source: str  # where the numbers come from, in words
    gather: float = 0.0  # train_sync.py: seconds in which the ranks send each other their groups


def save(times: dict[str, ServiceTimes], path: Path) -> None:
    """times: "split" and "colocated", or one of them."""
    path.write_text(json.dumps({where: asdict(of) for where, of in times.items()}, indent=1) + "\n")


def load(path: Path) -> dict[str, ServiceTimes]:
    """What `save` wrote. Raises UserError for another file."""
    try:
        return {where: from_dict(data) for where, data in json.loads(path.read_text()).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no service times ({error}). plan.py --calibrate writes such files.") from None


def from_dict(data: dict) -> ServiceTimes:
    engine = data["engine"] | {name: tuple(data["engine"][name]) for name in ("running", "seconds")}
    return ServiceTimes(**data | {"engine": EngineTimes(**engine), "learner": LearnerTimes(**data["learner"])})


def _linear(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The line through the two points nearest to x; through the only one, a constant. Never below half of the nearest."""
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    nearest = ys[0] if x < xs[0] else ys[-1] if x > xs[-1] else 0.0
    return max(ys[i - 1] + slope * (x - xs[i - 1]), nearest / 2)

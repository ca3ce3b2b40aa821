"""Numbers of runs and groups, and their format in tables and conclusions."""

from collections.abc import Callable

import numpy as np

from tools.report.logs import Log, RunGroup, is_accuracy

MIN_STEPS = 20  # that a run needs for a conclusion about its learning or its speed
MIN_SEEDS = 3  # runs that each group needs for a conclusion about a difference in learning
REWARD, THROUGHPUT, STEP_SECONDS = "critic/score/mean", "tokens/s", "perf/time_per_step"
HELD = "fully_async/rollouter/held_ratio"
IDLE = {"generator": "fully_async/rollouter/idle_ratio", "learner": "fully_async/trainer/idle_ratio"}
Row = tuple[str, str, str]  # subject, conclusion, the numbers it rests on


def spread(values: list[float], form: str = ".3f") -> str:
    """Return a table's text on a group's values: the mean, with the lowest and the highest if they differ."""
    if not values:
        return "-"
    mean, low, high = (f"{value:{form}}" for value in (np.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} - {high})"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def times(ratio: float) -> str:
    """Return a ratio as text, such as 3.3x."""
    return f"{digits(ratio)}x"


def digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def accuracy_names(group: RunGroup) -> list[str]:
    return sorted({name for log in group.logs for name in log.names if is_accuracy(name)})


def accuracy_at(log: Log, which: int) -> float | None:
    """Return the accuracy of the first (0) or last (-1) validation, averaged over its data sources."""
    curves = [log.points(name) for name in accuracy_names(RunGroup("", [log]))]
    return float(np.mean([c[which, 1] for c in curves])) if curves else None


def of(name: str, reduce: Callable[[np.ndarray], float], last: int | None = None) -> Callable[[Log], float | None]:
    """Return a function that reduces a run's values [n] of that metric to a number. last: only so many of them."""
    return lambda log: float(reduce(values)) if len(values := log.points(name)[::-1, 1][:last]) else None


def last(name: str) -> Callable[[Log], float | None]:
    return of(name, np.mean, 1)


def share(name: str) -> Callable[[Log], float | None]:
    return lambda log: log.over_time(name)


def too_few_steps(group: RunGroup, metric: str) -> Row | None:
    """Return the row that says why nothing is concluded from the group's steps of that metric; None if there are enough
    steps."""
    steps = group.shortest(metric)
    sentence = f"too few steps to say anything: {steps}, where {MIN_STEPS} are the least"
    return (group.label, sentence, f"{metric} of {steps} steps") if steps < MIN_STEPS else None

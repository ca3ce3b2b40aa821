"""The speed of groups: tokens/s, seconds a step and MFU, and their ratios with an interval over steps.

A quantity is measured at every step as a pair (numerator, denominator), [n, 2], and a run's value is the ratio of the two sums:
the tokens of all steps over their seconds, for example. So a step that waits for the samples of four steps counts in full,
while a median would ignore it. The interval is a bootstrap over blocks of steps, since neighbouring steps are alike. It says
how much the steps of these runs differ, and nothing about other runs, machines or learning. The first step of each attempt is
left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.report.logs import MIN_STEPS, STEP_SECONDS, Log, Row, RunGroup, count, digits, is_only_validated, own_seconds, times

RESAMPLES = 2000


def _seconds(row: dict[str, float]) -> float | None:
    """Return the step's seconds, without validation and saving if that was recorded."""
    return None if is_only_validated(row) else row.get(STEP_SECONDS) or own_seconds(row)


def _tokens(row: dict[str, float]) -> tuple[float | None, float | None]:
    return row.get("perf/total_num_tokens"), row.get(STEP_SECONDS)


def _tokens_of_a_rank(row: dict[str, float]) -> tuple[float | None, float | None]:
    seconds = _seconds(row)
    return row.get("perf/throughput", 0.0) * (seconds or 0.0), seconds


@dataclass(frozen=True)
class Quantity:
    name: str
    form: str
    says: str  # with {ours}, {base} and their {ratio}
    measure: Callable[[dict[str, float]], tuple[float | None, float | None]]  # of a row: numerator, denominator

    def at(self, row: dict[str, float]) -> tuple[float, float] | None:
        """Return (numerator, denominator) at a step; None if it was not recorded. verl writes 0 for what it does not know."""
        found = self.measure(row)
        return found if all(found) else None

    def steps(self, *logs: Log) -> np.ndarray:
        """Return [n, 2]: (numerator, denominator) at each step of all logs."""
        return np.array([at for log in logs for row in log.steady if (at := self.at(row))], dtype=float).reshape(-1, 2)

    def recorded(self, log: Log) -> int:
        """Return the number of steps at which it was recorded, including the first of each attempt."""
        return sum(self.at(row) is not None for row in log.rows)

    def value(self, *logs: Log) -> float | None:
        """Return the value over all steps of all logs."""
        amount, of = self.steps(*logs).sum(0)
        return float(amount / of) if of else None

    def median(self, log: Log) -> float | None:
        steps = self.steps(log)
        return float(np.median(steps[:, 0] / steps[:, 1])) if len(steps) else None

    def with_quartiles(self, group: RunGroup) -> str:
        """Return the group's value as text, with the quartiles of the steps in brackets."""
        steps = self.steps(*group.logs)
        low, high = (f"{quartile:{self.form}}" for quartile in np.quantile(steps[:, 0] / steps[:, 1], (0.25, 0.75)))
        return f"{self.value(*group.logs):{self.form}} ({low} - {high})"


TOKENS = Quantity("tokens/s of all ranks", ",.0f", "{ours} makes {ratio} the tokens/s of {base}", _tokens)
A_RANK = Quantity("tokens/s a rank", ",.0f", "a rank of {ours} makes {ratio} the tokens/s of one of {base}", _tokens_of_a_rank)
STEP = Quantity(
    "seconds a step", ".3g", "a step of {ours} takes {ratio} the seconds of one of {base}", lambda row: (_seconds(row), 1)
)
UPDATE = "the update of {ours} has {ratio} the MFU of that of {base}"
MFU = Quantity("MFU of the update", ".1%", UPDATE, lambda row: (row.get("perf/mfu/actor"), 1))


def compared(ours: RunGroup, base: RunGroup) -> list[Row]:
    """Return rows that compare a group's speed with another's, for each quantity that both recorded. Without the tokens of all
    ranks, those of one rank are compared."""
    both = [q for q in (TOKENS, A_RANK, STEP, MFU) if all(len(q.steps(log)) for log in [*ours.logs, *base.logs])]
    return [_row(quantity, ours, base) for quantity in both if not (quantity is A_RANK and TOKENS in both)]


def _row(quantity: Quantity, ours: RunGroup, base: RunGroup) -> Row:
    of = f"{ours.label} / {base.label}"
    rests = f"{quantity.name} over all steps, with the steps' quartiles: "
    rests += " / ".join(map(quantity.with_quartiles, (ours, base)))
    steps = [sum(map(quantity.recorded, group.logs)) for group in (ours, base)]
    rests += f"; {steps[0]} and {count(steps[1], 'step')}, {len(ours.logs)} and {count(len(base.logs), 'run')}"
    if len(machines := {_machine(log) for log in [*ours.logs, *base.logs]}) > 1 and None not in machines:
        rests += ", on different machines"
    return of, _sentence(quantity, ours, base), rests


def _sentence(quantity: Quantity, ours: RunGroup, base: RunGroup) -> str:
    values = [group.each(quantity.value) for group in (ours, base)]
    ratio = quantity.value(*ours.logs) / quantity.value(*base.logs)
    said = quantity.says.format(ours=ours.label, base=base.label, ratio=times(ratio))
    fewest, short = min((quantity.recorded(log), group.label) for group in (ours, base) for log in group.logs)
    if fewest < MIN_STEPS:
        few = f"too few steps to compare {quantity.name}: {short} has {fewest}, where {MIN_STEPS} are the least"
        return f"{few}. In the steps so far {said}"
    # the first step after a publish may wait for the samples of all up to the next
    runs = [[(quantity.steps(log), log.flags.get("publish_every") or 1) for log in group.logs] for group in (ours, base)]
    low, high = interval(*runs)
    over = f"({digits(low)}-{digits(high)} over steps)"
    several = max(map(len, values)) > 1
    if several and min(values[0]) <= max(values[1]) and min(values[1]) <= max(values[0]):
        return f"{quantity.name}: the runs overlap, no difference is shown; {times(ratio)} {over}"
    if low <= 1 <= high:
        return f"{quantity.name}: no difference is shown beyond that of the steps; {times(ratio)} {over}"
    return f"{said} {over}{', in every run' if several else ''}{_more(quantity, ours, base, ratio)}"


def _more(quantity: Quantity, ours: RunGroup, base: RunGroup, ratio: float) -> str:
    """Return the end of the sentence: how many tokens the compared steps have, or how many ranks share the tokens."""
    if quantity is STEP and all(len(TOKENS.steps(log)) for log in [*ours.logs, *base.logs]):
        sizes = [np.mean(TOKENS.steps(*group.logs)[:, 0]) for group in (ours, base)]
        return f", with {times(sizes[0] / sizes[1])} the tokens"
    ranks = [_ranks(ours), _ranks(base)]
    if quantity is TOKENS and None not in ranks and ranks[0] != ranks[1]:
        return f"; on {ranks[0]} against {count(ranks[1], 'rank')}, which is {times(ratio * ranks[1] / ranks[0])} a rank"
    return ""


def interval(ours: list[tuple[np.ndarray, int]], base: list[tuple[np.ndarray, int]]) -> tuple[float, float]:
    """Return the middle 95% of the ratio of ours to base, over resamples of each run's steps, [n, 2], in blocks of neighbouring
    steps. The number with each run is the length of the shortest block."""
    random = np.random.default_rng(0)
    sums = [sum(_resampled(steps, block, random) for steps, block in of) for of in (ours, base)]
    ratios = (sums[0][:, 0] / sums[0][:, 1]) / (sums[1][:, 0] / sums[1][:, 1])
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def _resampled(steps: np.ndarray, block: int, random: np.random.Generator) -> np.ndarray:
    """Return [RESAMPLES, 2]: sums over about as many steps as there are, drawn in blocks that wrap around."""
    n = len(steps)
    block = min(n, max(block, round(n ** (1 / 3))))
    up_to = np.concatenate([np.zeros((1, 2)), np.cumsum(np.concatenate([steps, steps[:block]]), axis=0)])
    sums = up_to[block : block + n] - up_to[:n]  # of the block that begins at each step
    return sums[random.integers(0, n, (RESAMPLES, -(-n // block)))].sum(1)


def _ranks(group: RunGroup) -> int | None:
    """Return the number of ranks of the whole job, as the tokens/s of all over those of one; None if it was not recorded."""
    rows = [row for log in group.logs for row in log.steady if TOKENS.at(row) and row.get("perf/throughput")]
    return round(np.median([row["tokens/s"] / row["perf/throughput"] for row in rows])) if rows else None


def _machine(log: Log) -> str | None:
    hardware = log.config.get("hardware")
    return hardware and f"{hardware.get('device_name')}, {hardware.get('cpu')}, {hardware.get('cores')}"

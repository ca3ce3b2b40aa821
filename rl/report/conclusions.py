"""Conclusions from the numbers of runs, each beside the numbers it rests on; or the remark that these are too few.

Every function returns rows (of what, conclusion, the numbers it rests on). A claim about learning needs MIN_STEPS steps, one
between groups MIN_SEEDS runs of each that do not overlap.
"""

import math
from collections import Counter

import numpy as np

from rl.balance import advice
from rl.report.logs import Log, RunGroup, is_accuracy, smoothed

MIN_STEPS, MIN_SEEDS = 20, 3
REWARD, THROUGHPUT = "critic/score/mean", "tokens/s"
IDLE = {"generator": "fully_async/rollouter/idle_ratio", "learner": "fully_async/trainer/idle_ratio"}
LEVELS = (0.5, 0.75, 0.9, 1.0)  # of the way that all runs have gone, for the speed-up
Row = tuple[str, str, str]


def spread(values: list[float], form: str = ".3f") -> str:
    """The mean, with lowest and highest if they differ; what a table says of a group."""
    if not values:
        return "-"
    mean, low, high = (f"{value:{form}}" for value in (np.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} - {high})"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def accuracy_names(group: RunGroup) -> list[str]:
    return sorted({name for log in group.logs for row in log.validations for name in row if is_accuracy(name)})


def accuracy_at(log: Log, which: int) -> float | None:
    """The first (0) or last (-1) validation's accuracy, the mean over its data sources."""
    curves = [log.points(name) for name in accuracy_names(RunGroup("", [log]))]
    return float(np.mean([c[which, 1] for c in curves])) if curves else None


def last_reward(log: Log, steps: int) -> float | None:
    points = log.points(REWARD)
    return float(points[-steps:, 1].mean()) if len(points) else None


def overview(groups: list[RunGroup], smooth: int) -> list[list[str]]:
    """The table of groups, its header first."""
    head = ["group", "runs", "steps", "seconds of training", f"reward, last {smooth} steps", "accuracy, first", "last"]
    out = [[*head, "tokens/s, median step", "tokens/s, all steps", "state"]]
    for group in groups:
        out.append(
            [
                group.label,
                str(len(group.logs)),
                spread([log.steps for log in group.logs], ".0f"),
                spread([log.seconds for log in group.logs], ".0f"),
                spread(group.each(lambda log: last_reward(log, smooth))),
                spread(group.each(lambda log: accuracy_at(log, 0))),
                spread(group.each(lambda log: accuracy_at(log, -1))),
                spread(group.each(lambda log: _median(log, THROUGHPUT)), ",.0f"),
                spread(group.each(lambda log: log.tokens_per_second), ",.0f"),
                ", ".join(sorted({log.state for log in group.logs if log.state})),
            ]
        )
    return out


def conclude(groups: list[RunGroup]) -> list[Row]:
    rows = [
        row for group in groups for about in (learning, accuracy, waiting, lengths, mismatch, trouble) for row in about(group)
    ]
    return rows + between(groups)


def enough(group: RunGroup, metric: str) -> Row | None:
    """None, or the row that says why nothing is concluded from the group's steps of that metric."""
    steps = min(len(log.points(metric)) for log in group.logs)
    told = f"too few steps to say anything: {steps}, where {MIN_STEPS} are the least"
    return (group.label, told, f"{metric} of {steps} steps") if steps < MIN_STEPS else None


def learning(group: RunGroup) -> list[Row]:
    """Says whether the reward moved by more than twice the noise of the two means."""
    if few := enough(group, REWARD):
        return [few]
    width = min(MIN_STEPS, min(len(log.points(REWARD)) for log in group.logs) // 2)
    first, last = (
        np.concatenate([log.points(REWARD)[part, 1] for log in group.logs]) for part in (slice(width), slice(-width, None))
    )
    change, noise = last.mean() - first.mean(), math.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    told = f"the reward {'rose' if change > 0 else 'fell'} from {first.mean():.3f} to {last.mean():.3f}"
    if abs(change) <= 2 * noise:
        told = f"the reward did not move beyond its noise ({first.mean():.3f} to {last.mean():.3f})"
    return [
        (group.label, told, f"means of the first and the last {width} steps; change {change:+.3f}, standard error {noise:.3f}")
    ]


def accuracy(group: RunGroup) -> list[Row]:
    out = []
    for name in accuracy_names(group):
        curves = [p[:, 1] for log in group.logs if len(p := log.points(name))]
        first, last = [c[0] for c in curves], [c[-1] for c in curves]
        counts = f"{count(min(map(len, curves)), 'validation')}, {count(len(curves), 'run')}"
        rests = f"{name}: {counts}: {spread(first)} before, {spread(last)} after"
        if min(map(len, curves)) < 2:
            told = "one validation: whether the accuracy moved cannot be told"
        elif len(curves) < MIN_SEEDS:
            few = ("one run", "two runs")[len(curves) - 1]
            told = f"validation accuracy went from {np.mean(first):.3f} to {np.mean(last):.3f}; {few}: too few for a spread"
        elif min(last) > max(first) or max(last) < min(first):
            word = "rose" if min(last) > max(first) else "fell"
            told = f"validation accuracy {word} from {np.mean(first):.3f} to {np.mean(last):.3f}, in every run"
        else:
            told = "the runs' validation accuracies before and after overlap: no change beyond the spread"
        out.append((group.label, told, rests))
    return out


def waiting(group: RunGroup) -> list[Row]:
    """Who waited for whom, and the split that would balance them."""
    idle = {role: group.each(lambda log, n=name: log.over_time(n)) for role, name in IDLE.items()}
    if not all(idle.values()):
        return []
    if few := enough(group, IDLE["learner"]):
        return [(few[0], few[1].replace("anything", "who waits for whom"), few[2])]
    generators, learners = (len(ranks_of(group, role)) for role in ("generator", "learner"))
    if not (generators and learners):
        return []
    layout = group.logs[0].config.get("hardware", {}).get("layout", [])
    splits = [Counter(name.split()[0] for name in node["ranks"].values()) for node in layout]  # ranks by role
    alike = len(splits) or 1 if all(split == splits[0] for split in splits) else None
    told = advice(generators, learners, alike, *(float(np.mean(idle[role])) for role in ("generator", "learner")))
    rests = f"{IDLE['generator']} {spread(idle['generator'], '.0%')}, {IDLE['learner']} {spread(idle['learner'], '.0%')}"
    return [(group.label, told, f"{rests}, the first step of each attempt left out; {generators} to {learners} ranks")]


def ranks_of(group: RunGroup, role: str) -> set[str]:
    """Names of the group's ranks of that role, out of its ledgers."""
    names = {name.split("/")[1] for log in group.logs for row in log.rows for name in row if name.startswith("ledger/")}
    return {name for name in names if name.rpartition("_")[0] == role}


def lengths(group: RunGroup) -> list[Row]:
    truncated = [p[-MIN_STEPS:, 1].mean() for log in group.logs if len(p := log.points("response_length/clip_ratio"))]
    if not truncated or np.mean(truncated) <= 0.1:
        return []
    told = f"{np.mean(truncated):.0%} of the last responses were cut at --max-response-length: their answers are lost"
    return [(group.label, told, f"response_length/clip_ratio, last {MIN_STEPS} steps: {spread(truncated)}")]


def mismatch(group: RunGroup) -> list[Row]:
    """Generator against learner. Only in fp32 and on-policy is there a bound: else precision and staleness explain much."""
    name = "training/rollout_probs_diff_max"
    worst = group.each(lambda log: p[:, 1].max() if len(p := log.points(name)) else None)
    stale = any(row.get("staleness/max", 0) > 0 for log in group.logs for row in log.rows)
    precise = all(log.flags.get("dtype") == "float32" for log in group.logs)
    if not worst or stale or not precise:
        return []
    bad = max(worst) > 0.1
    told = (
        "generator and learner disagree on a token's probability: something is wrong" if bad else "generator and learner agree"
    )
    return [(group.label, f"{told} (fp32, on-policy)", f"{name}: {max(worst):.2g}, where 0.1 is the bound")]


def trouble(group: RunGroup) -> list[Row]:
    """Counters that should be zero."""
    counters = {"actor/skipped_steps": "optimizer steps were skipped for a non-finite gradient"}
    kinds = ("timeout", "error", "bad_value", "died", "image")
    counters |= {f"reward/events/{kind}": f"responses could not be scored ({kind})" for kind in kinds}
    counters |= {"fully_async/count/dropped_stale_samples": "prompts were dropped as too stale"}
    out = []
    for name, told in counters.items():
        counts = group.each(lambda log, n=name: p[-1, 1] if len(p := log.points(n)) else None)
        if counts and max(counts) > 0:
            out.append((group.label, f"{spread(counts, '.0f')} {told}", name))
    return out


def between(groups: list[RunGroup]) -> list[Row]:
    """The groups against the first, where every run of the one lies beyond every run of the other."""
    if len(groups) < 2:
        return []
    numbers = [("reward of the last steps", REWARD, lambda log: last_reward(log, MIN_STEPS), ".3f")]
    numbers += [(f"last {name}", name, lambda log, n=name: _last(log, n), ".3f") for name in accuracy_names(groups[0])]
    numbers += [("tokens/s of the median step", THROUGHPUT, lambda log: _median(log, THROUGHPUT), ",.0f")]
    out = []
    for what, name, number, form in numbers:
        base = groups[0].each(number)
        for group in groups[1:]:
            if base and (ours := group.each(number)):
                told = _compared(ours, base, name, [*group.logs, *groups[0].logs])
                rests = f"{what}: {spread(ours, form)} / {spread(base, form)}, {len(ours)} and {len(base)} runs"
                out.append((f"{group.label} / {groups[0].label}", f"{what}{told}", rests))
    return out


def _compared(ours: list[float], base: list[float], name: str, logs: list[Log]) -> str:
    """What can be said of a group's numbers beside the first group's. name: the metric; logs: of both groups."""
    steps = min(len(log.points(THROUGHPUT if name == THROUGHPUT else REWARD)) for log in logs)
    ends = sorted({log.steps for log in logs})
    if steps < MIN_STEPS:
        return f": too few steps to compare ({steps})"
    if len(ends) > 1 and name != THROUGHPUT:
        return f": the runs stopped at different steps ({ends[0]} to {ends[-1]}), so their ends do not compare"
    if min(len(ours), len(base)) < MIN_SEEDS:
        return f": too few runs to compare; {MIN_SEEDS} of each are the least"
    if min(ours) > max(base) or max(ours) < min(base):
        ratio = f": {np.mean(ours) / np.mean(base):.2f} times as much" if np.mean(base) > 0 else ""
        return f" {'higher' if min(ours) > max(base) else 'lower'} in every run{ratio}"
    return ": the runs overlap, no difference is shown"


def _last(log: Log, name: str) -> float | None:
    points = log.points(name)
    return float(points[-1, 1]) if len(points) else None


def _median(log: Log, name: str) -> float | None:
    points = log.points(name)
    return float(np.median(points[:, 1])) if len(points) else None


# ------------------------------------------------------------------------------------------------------ speed-up


def speedup(groups: list[RunGroup], base: RunGroup, smooth: int) -> list[list[str]]:
    """Wall clock to the same reward, base over group, at levels that every run reaches and none starts above; header first.
    The reward is the mean of `smooth` steps, so that no lucky batch counts."""
    out = [["group", "level of reward", "seconds", f"seconds of {base.label}", "speed-up", "worst to best pair"]]
    for group in (g for g in groups if g is not base):
        curves = {g.label: [smoothed(log.points(REWARD, "seconds"), smooth) for log in g.logs] for g in (group, base)}
        every = [c for of in curves.values() for c in of]
        if min(map(len, every)) < MIN_STEPS:
            out.append([group.label, "-", "-", "-", "-", f"too few steps: {smooth + MIN_STEPS - 1} are the least"])
            continue
        low, high = max(c[0, 1] for c in every), min(c[:, 1].max() for c in every)
        if high <= low:
            out.append([group.label, "-", "-", "-", "-", "no level that all runs reach and none starts above"])
            continue
        for level in (low + share * (high - low) for share in LEVELS):
            ours, theirs = ([first_at(c, level) for c in curves[g.label]] for g in (group, base))
            worst, best = min(theirs) / max(ours), max(theirs) / min(ours)
            verdict = "one pair: no spread" if len(ours) == len(theirs) == 1 else f"{worst:.2f} - {best:.2f}"
            if min(len(ours), len(theirs)) >= MIN_SEEDS and worst <= 1 <= best:
                verdict += ", not told apart"
            ratio = np.mean(theirs) / np.mean(ours)
            out.append([group.label, f"{level:.3f}", spread(ours, ".1f"), spread(theirs, ".1f"), f"{ratio:.2f}", verdict])
    return out


def first_at(curve: np.ndarray, level: float) -> float:
    """Seconds at which the curve first is at the level. curve [n, 2]; it must get there."""
    return float(curve[np.argmax(curve[:, 1] >= level), 0])

"""Conclusions from the numbers of runs, each with the numbers it rests on, or a remark that there are too few.

Every function returns rows (subject, conclusion, the numbers it rests on). A claim about learning or speed needs MIN_STEPS
steps. A claim about a difference in learning between groups needs MIN_SEEDS runs of each, which do not overlap. For a
difference in speed one run of each is enough, since every step measures it (tools/report/speed.py).
"""

import json
import math

import numpy as np

from rl.record.validations import COLUMNS, RESPONSES, rows_of
from tools.report import logs, speed, waits
from tools.report.logs import Log, Row, RunGroup, count, last, of, smoothed, spread

OF_ALL, A_RANK = "tokens/s of all ranks, median step", "tokens/s a rank, median step"
ROWS, CHARACTERS = 10, 600  # of a validation's responses; of each of their texts, whose middle is left out
LEVELS = (0.5, 0.75, 0.9, 1.0)  # fractions of the range of reward that all runs have covered, for the speed-up


def overview(groups: list[RunGroup], smooth: int) -> list[list[str]]:
    """Return the table of groups, header first. It has no column for MFU or waiting if no group recorded it, and tokens/s a
    rank only if a group recorded no others."""
    smooth = min([smooth, *(shortest for group in groups if (shortest := group.shortest(logs.REWARD)))])
    numbers = {
        "steps": (lambda log: log.steps, ".0f"),
        "seconds of training": (lambda log: log.seconds, ".0f"),
        f"reward, last {smooth} steps": (of(logs.REWARD, np.mean, smooth), ".3f"),
        "accuracy, first": (lambda log: logs.accuracy_at(log, 0), ".3f"),
        "last": (lambda log: logs.accuracy_at(log, -1), ".3f"),
        "seconds a step, median": (speed.STEP.median, ".3g"),
        OF_ALL: (speed.TOKENS.median, ",.0f"),
        "tokens/s of all ranks, all steps": (lambda log: log.tokens_per_second, ",.0f"),
        A_RANK: (speed.A_RANK.median, ",.0f"),
        "MFU": (speed.MFU.median, ".1%"),
    }
    table = {"group": [group.label for group in groups], "runs": [str(len(group.logs)) for group in groups]}
    for head, (number, form) in (numbers | waits.COLUMNS).items():
        cells = [spread(group.each(number), form) for group in groups]
        table |= {} if head in ("MFU", *waits.COLUMNS) and {*cells} == {"-"} else {head: cells}
    if all(a_rank == "-" or of_all != "-" for a_rank, of_all in zip(table[A_RANK], table[OF_ALL], strict=True)):
        del table[A_RANK]
    table["state"] = [", ".join(sorted({log.state for log in group.logs if log.state})) for group in groups]
    return [list(table), *map(list, zip(*table.values(), strict=True))]


def conclude(groups: list[RunGroup]) -> list[Row]:
    kinds = (learning, accuracy, waits.waiting, waits.reasons, waits.ages, lengths, mismatch, utilization, trouble)
    return [row for group in groups for about in kinds for row in about(group)] + between(groups)


def learning(group: RunGroup) -> list[Row]:
    """Say whether the reward moved by more than twice the noise of the two means."""
    if few := logs.too_few_steps(group, logs.REWARD):
        return [few]
    width = min(logs.MIN_STEPS, min(len(log.points(logs.REWARD)) for log in group.logs) // 2)
    first, last = (
        np.concatenate([log.points(logs.REWARD)[part, 1] for log in group.logs]) for part in (slice(width), slice(-width, None))
    )
    change = last.mean() - first.mean()
    noise = math.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    said = f"the reward {'rose' if change > 0 else 'fell'} from {first.mean():.3f} to {last.mean():.3f}"
    if abs(change) <= 2 * noise:
        said = f"the reward did not move beyond its noise ({first.mean():.3f} to {last.mean():.3f})"
    return [
        (group.label, said, f"means of the first and the last {width} steps; change {change:+.3f}, standard error {noise:.3f}")
    ]


def accuracy(group: RunGroup) -> list[Row]:
    out = []
    for name in logs.accuracy_names(group):
        curves = [p[:, 1] for log in group.logs if len(p := log.points(name))]
        first, last = [c[0] for c in curves], [c[-1] for c in curves]
        counts = f"{count(min(map(len, curves)), 'validation')}, {count(len(curves), 'run')}"
        rests = f"{name}: {counts}: {spread(first)} before, {spread(last)} after"
        if min(map(len, curves)) < 2:
            said = "one validation: it cannot show whether the accuracy moved"
        elif len(curves) < logs.MIN_SEEDS:
            few = ("one run", "two runs")[len(curves) - 1]
            said = f"validation accuracy went from {np.mean(first):.3f} to {np.mean(last):.3f}; {few}: too few for a spread"
        elif min(last) > max(first) or max(last) < min(first):
            word = "rose" if min(last) > max(first) else "fell"
            said = f"validation accuracy {word} from {np.mean(first):.3f} to {np.mean(last):.3f}, in every run"
        else:
            said = "the runs' validation accuracies before and after overlap: no change beyond the spread"
        out.append((group.label, said, rests))
    return out


def lengths(group: RunGroup) -> list[Row]:
    truncated = group.each(of("response_length/clip_ratio", np.mean, logs.MIN_STEPS))
    if not truncated or np.mean(truncated) <= 0.1:
        return []
    said = f"{np.mean(truncated):.0%} of the last responses were cut at --max-response-length: their answers are lost"
    return [(group.label, said, f"response_length/clip_ratio, last {logs.MIN_STEPS} steps: {spread(truncated)}")]


def mismatch(group: RunGroup) -> list[Row]:
    """Compare the generator's probabilities with the learner's. There is a bound only in fp32 and on-policy: otherwise
    precision and staleness explain large differences."""
    name = "training/rollout_probs_diff_max"
    worst = group.each(of(name, np.max))
    stale = any(row.get("staleness/max", 0) > 0 for log in group.logs for row in log.rows)
    precise = all(log.flags.get("dtype") == "float32" for log in group.logs)
    if not worst or stale or not precise:
        return []
    said = "disagree on a token's probability: something is wrong" if max(worst) > 0.1 else "agree"
    rests = f"{name}: {max(worst):.2g}, where 0.1 is the bound"
    return [(group.label, f"generator and learner {said} (fp32, on-policy)", rests)]


def utilization(group: RunGroup) -> list[Row]:
    """Name an MFU that no device can have."""
    highest = max((row.get("perf/mfu/actor", 0.0) for log in group.logs for row in log.rows), default=0.0)
    if highest <= 1:
        return []
    said = "an MFU above 100% is impossible: it was divided by the peak of a slower device, or FLOP were counted that are not "
    return [
        (group.label, f"{said}computed. It compares only with runs of the same device", f"perf/mfu/actor: up to {highest:.1%}")
    ]


def trouble(group: RunGroup) -> list[Row]:
    """Report counters that should be zero."""
    counters = {"actor/skipped_steps": "optimizer steps were skipped for a non-finite gradient"}
    kinds = ("timeout", "error", "bad_value", "died", "image", "outage")
    counters |= {f"reward/events/{kind}": f"responses could not be scored ({kind})" for kind in kinds}
    counters |= {"fully_async/count/dropped_stale_samples": "prompts were dropped as too stale"}
    out = []
    for name, said in counters.items():
        counts = group.each(last(name))
        if counts and max(counts) > 0:
            out.append((group.label, f"{spread(counts, '.0f')} {said}", name))
    return out


def between(groups: list[RunGroup]) -> list[Row]:
    """Compare each group with the first one: its speed, and its learning, with a difference only if every run of the one lies
    beyond every run of the other."""
    base, *others = groups
    out = [row for group in others for row in speed.compared(group, base)]
    accuracies = [(f"last {name}", last(name)) for name in logs.accuracy_names(base)]
    for group in others:
        steps = min(logs.MIN_STEPS, group.shortest(logs.REWARD), base.shortest(logs.REWARD))  # of each run as many
        rewards = ("reward of the last steps", of(logs.REWARD, np.mean, steps))
        for what, number in [rewards, *accuracies]:
            theirs = base.each(number)
            if theirs and (ours := group.each(number)):
                said = _compared(ours, theirs, [*group.logs, *base.logs])
                rests = f"{what}: {spread(ours)} / {spread(theirs)}, {len(ours)} and {count(len(theirs), 'run')}"
                rests += f", {steps} steps of each" if what == rewards[0] else ""
                out.append((f"{group.label} / {base.label}", f"{what}{said}", rests))
    return out


def _compared(ours: list[float], base: list[float], recorded: list[Log]) -> str:
    """Return what can be said about a group's rewards or accuracies compared with the first group's. recorded: of both."""
    steps = RunGroup("", recorded).shortest(logs.REWARD)
    ends = sorted({log.steps for log in recorded})
    if steps < logs.MIN_STEPS:
        return f": too few steps to compare ({steps})"
    if len(ends) > 1:
        return f": the runs stopped at different steps ({ends[0]} to {ends[-1]}), so their ends do not compare"
    if min(len(ours), len(base)) < logs.MIN_SEEDS:
        return f": too few runs to compare; {logs.MIN_SEEDS} of each are the least"
    if min(ours) > max(base) or max(ours) < min(base):
        ratio = f": {np.mean(ours) / np.mean(base):.2f} times as much" if np.mean(base) > 0 else ""
        return f" {'higher' if min(ours) > max(base) else 'lower'} in every run{ratio}"
    return ": the runs overlap, no difference is shown"


# ------------------------------------------------------------------------------------------------------ responses


def responses(group: RunGroup) -> tuple[str, list[list[str]]] | None:
    """Return (heading, table with its header first) of the last validation of the group's first run that recorded responses;
    None if no run has."""
    for log in group.logs:
        run = log.path if log.path.is_dir() else log.path.parent
        for file in sorted(run.glob(f"{RESPONSES}/step_*.jsonl"), reverse=True):
            if rows := [row for row in rows_of(file) if {*COLUMNS} <= row.keys()][:ROWS]:
                heading = f"Validation responses of {group.label}, {log.path.name}, after step {rows[0]['step']}"
                return heading, [[*COLUMNS], *([_shown(row[name]) for name in COLUMNS] for row in rows)]
    return None


def _shown(value: object) -> str:
    value = f"{value:.3f}" if isinstance(value, float) else "unscored" if value is None else value
    text = value if isinstance(value, str) else json.dumps(value)
    text = text if len(text) <= CHARACTERS else f"{text[: CHARACTERS // 2]} ... {text[-CHARACTERS // 2 :]}"
    return text.encode(errors="backslashreplace").decode()  # a response may hold half a character


# ------------------------------------------------------------------------------------------------------ speed-up


def speedup(groups: list[RunGroup], base: RunGroup, smooth: int) -> list[list[str]]:
    """Return the table of wall-clock time to the same reward, base over group, at levels that every run reaches and none starts
    above; header first. The reward is the mean of `smooth` steps, so that no lucky batch counts."""
    out = [["group", "level of reward", "seconds", f"seconds of {base.label}", "speed-up", "worst to best pair"]]
    for group in (g for g in groups if g is not base):
        curves = {g.label: [smoothed(log.points(logs.REWARD, "seconds"), smooth) for log in g.logs] for g in (group, base)}
        every = [c for of in curves.values() for c in of]
        if min(map(len, every)) < logs.MIN_STEPS:
            out.append([group.label, "-", "-", "-", "-", f"too few steps: {smooth + logs.MIN_STEPS - 1} are the least"])
            continue
        low = max(c[0, 1] for c in every)
        high = min(c[:, 1].max() for c in every)
        if high <= low:
            out.append([group.label, "-", "-", "-", "-", "no level that all runs reach and none starts above"])
            continue
        for level in (low + share * (high - low) for share in LEVELS):
            ours, theirs = ([first_at(c, level) for c in curves[g.label]] for g in (group, base))
            worst, best = min(theirs) / max(ours), max(theirs) / min(ours)
            verdict = "one pair: no spread" if len(ours) == len(theirs) == 1 else f"{worst:.2f} - {best:.2f}"
            if min(len(ours), len(theirs)) >= logs.MIN_SEEDS and worst <= 1 <= best:
                verdict += ", not distinguishable"
            ratio = np.mean(theirs) / np.mean(ours)
            out.append([group.label, f"{level:.3f}", spread(ours, ".1f"), spread(theirs, ".1f"), f"{ratio:.2f}", verdict])
    return out


def first_at(curve: np.ndarray, level: float) -> float:
    """Return the seconds at which the curve first reaches the level. curve [n, 2]; it must reach the level."""
    return float(curve[np.argmax(curve[:, 1] >= level), 0])

"""Waiting times in a split run and their reasons, the age of samples, and the bound of their staleness."""

from collections import Counter

import numpy as np

from tools.report.logs import HELD, IDLE, Row, RunGroup, count, last, of, share, spread, too_few_steps
from tools.report.readers import MAX_REQUIRED, PAUSES

MEAN_AGE, OLDEST = of("staleness/mean", np.mean), of("staleness/max", np.max)
COLUMNS = {  # of the table of groups
    "learners wait": (share(IDLE["learner"]), ".0%"),
    "generators wait": (share(IDLE["generator"]), ".0%"),
    "held by the staleness bound": (share(HELD), ".0%"),
    "age of tokens, versions": (MEAN_AGE, ".2f"),
    "oldest": (OLDEST, ".0f"),
    "staleness bound, samples": (last(MAX_REQUIRED), ".0f"),
}
BALANCED, OVERLAPPING = 0.1, 0.2  # idle shares: neither side waits longer than the one; both wait longer than the other


def waiting(group: RunGroup) -> list[Row]:
    """Say who waited for whom or for graders, and, if the ranks were recorded, which split would balance them."""
    idle = {role: group.each(share(name)) for role, name in IDLE.items()}
    if not all(idle.values()):
        return []
    if few := too_few_steps(group, IDLE["learner"]):
        return [(few[0], few[1].replace("anything", "who waits for whom"), few[2])]
    generators, learners = (len(ranks_of(group, role)) for role in ("generator", "learner"))
    layout = group.logs[0].config.get("hardware", {}).get("layout", [])
    splits = [Counter(name.split()[0] for name in node["ranks"].values()) for node in layout]  # ranks by role
    alike = len(splits) or 1 if all(split == splits[0] for split in splits) else None
    names = sorted(f"ledger/{rank}/score" for rank in ranks_of(group, "generator"))
    scoring = [value for name in names for value in group.each(share(name))]
    shares = [float(np.mean(of or [0.0])) for of in (idle["generator"], idle["learner"], scoring)]
    advised, sentence = verdict(generators or 1, learners or 1, alike, *shares)
    rests = f"{IDLE['generator']} {spread(idle['generator'], '.0%')}, {IDLE['learner']} {spread(idle['learner'], '.0%')}"
    if advised == "graders":
        rests += f", ledger/generator_<n>/score {spread(scoring, '.0%')}"
    rests += ", the first step of each attempt left out"
    if generators and learners:
        return [(group.label, sentence, f"{rests}; {generators} to {learners} ranks")]
    return [(group.label, sentence.partition(":")[0], rests)]


def verdict(
    generators: int, learners: int, nodes: int | None, generators_idle: float, learners_idle: float, scoring: float
) -> tuple[str | int, str]:
    """Return the advice, "balanced", "graders", "turns" or the best number of generators, and a sentence.

    generators, learners: ranks of the whole job. nodes: their number if all are split alike, None if they differ. *_idle:
    fraction of the time in which a rank of that role waited for the other role. scoring: fraction of the time in which a
    generator only waited for scores or environments; while learners wait for samples, shorten this first.
    """
    waits = f"generators waited {generators_idle:.0%} of the time, learners {learners_idle:.0%}"
    if max(generators_idle, learners_idle) < BALANCED:
        return "balanced", f"{waits}: balanced"
    if min(scoring, learners_idle) >= BALANCED:
        remedy = "try more --reward-workers, or faster tools with --env, before another split"
        return "graders", f"{waits}: generators spent {scoring:.0%} of the time on scores; {remedy}"
    if min(generators_idle, learners_idle) > OVERLAPPING:
        remedy = "try a higher --staleness-threshold or fewer validations"
        return "turns", f"{waits}: they take turns, so another split does not help; {remedy}"
    ranks = generators + learners
    if ranks <= 2 * (nodes or 1):
        return generators, waits
    work = generators * (1 - generators_idle), learners * (1 - learners_idle)
    exact = ranks * work[0] / sum(work)  # generators, if ranks could be divided
    best = (nodes or 1) * min(ranks // (nodes or 1) - 1, max(1, round(exact / (nodes or 1))))
    rough = f"{exact:.1f} to {ranks - exact:.1f}"
    if best == generators:
        return best, f"{waits}: {generators} to {learners} is the best split of {ranks} ranks ({rough} would balance exactly)"
    better = f"{waits}: {best} to {ranks - best} would balance {ranks} ranks better ({rough} exactly)"
    if nodes is None:
        return best, f"{better}: change --generators on some of the nodes"
    return best, f"{better}: --generators {best // nodes}" + (f" on each of {nodes} nodes" if nodes > 1 else "")


def ranks_of(group: RunGroup, role: str) -> set[str]:
    """Return the names of the group's ranks of that role, from its ledgers."""
    names = {name.split("/")[1] for log in group.logs for name in log.names if name.startswith("ledger/")}
    return {name for name in names if name.rpartition("_")[0] == role}


def reasons(group: RunGroup) -> list[Row]:
    """Say why the generators waited: because of the staleness bound, or for another reason."""
    idle, held = (group.each(share(name)) for name in (IDLE["generator"], HELD))
    paused = [sum(row.get(name, 0) for log in group.logs for row in log.rows) for name in PAUSES.values()]
    samples = group.each(last(MAX_REQUIRED))
    bound = "the staleness bound" + (f" of {samples[0]:.0f} samples" if samples else "")
    if held and not too_few_steps(group, IDLE["learner"]):
        rest = np.mean(idle) - np.mean(held)
        sentence = f"{bound} held the generators for {np.mean(held):.0%} of the time"
        sentence += f"; for {max(0.0, rest):.0%} they waited for another reason"
        threshold = group.logs[0].flags.get("staleness_threshold")
        if np.mean(held) >= BALANCED and threshold is not None:
            sentence += f". A --staleness-threshold above {threshold:g} holds them less, and samples get older"
        return [(group.label, sentence, f"{HELD} {spread(held, '.0%')}, {IDLE['generator']} {spread(idle, '.0%')}")]
    if any(paused):
        sentence = f"the generators paused {count(int(paused[0]), 'time')} because {bound} was reached"
        sentence += f", {count(int(paused[1]), 'time')} because the queue was full"
        return [(group.label, sentence, "the rollouter's ShouldPause messages in verl's console log")]
    if idle and not held and np.mean(idle) >= BALANCED and not too_few_steps(group, IDLE["learner"]):
        return [(group.label, "why the generators waited was not recorded", f"no {HELD}")]
    return []


def ages(group: RunGroup) -> list[Row]:
    mean, oldest = group.each(MEAN_AGE), group.each(OLDEST)
    if not mean or not max(oldest, default=0):
        return []
    sentence = f"a trained token was {np.mean(mean):.2f} versions of the weights old on average, the oldest {max(oldest):.0f}"
    return [(group.label, sentence, f"staleness/mean {spread(mean, '.2f')}, staleness/max {spread(oldest, '.0f')}")]

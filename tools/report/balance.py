"""Advice on how to split a job's ranks into generators and learners. Needs no torch."""

BALANCED, OVERLAPPING = 0.1, 0.2  # idle shares: neither side waits longer than the one; both wait longer than the other


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

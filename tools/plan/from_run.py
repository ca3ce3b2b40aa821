"""Seconds of a run's parts, as recorded by a finished run in metrics.jsonl.

A run records how long its steps took, not how that depends on their size. The plan assumes that each token costs the same to
train, and that half of a decode step does not depend on the number of responses. It is best near the run's ranks and batch.
"""

import re
from pathlib import Path

import numpy as np

from rl.errors import UserError
from tools.plan.simulation import Times
from tools.report.logs import load

FIXED = 0.5  # of a decode step; measured, a third (CPU, 64 responses) to most of it (GPUs, few responses)
NOT_LEARNING = ("wait", "gen", "update_weights", "testing", "save_checkpoint")  # timers of the rest of a step


def times_of_run(path: Path) -> Times:
    """Raise UserError if the run's record does not say."""
    log = load(path)
    rows = [row for row in log.rows if row["step"] not in log.starts and "timing_s/update_actor" in row]
    if not rows or not log.responses_per_step:
        raise UserError(f"--from-run {path}: it has recorded no step with its timings after the first.")

    def mean(name: str) -> float:
        return float(np.mean([row.get(name, 0.0) for row in rows]))

    responses = log.responses_per_step
    length = mean("response_length/mean")
    learners = log.config.get("hardware", {}).get("world_size", 1)  # of the learners, if the run was split
    learned = mean("timing_s/step") - sum(mean(f"timing_s/{name}") for name in NOT_LEARNING)
    tokens = responses * (length + mean("prompt_length/mean") / log.flags["rollout_n"])
    publish = mean("timing_s/update_weights")
    per_engine = log.flags.get("rollout_tp", 1)
    ahead = 1.0  # batches under way at a time
    if mean("timing_s/gen"):
        busy = learners * mean("timing_s/gen")
        generators = learners
        receive = publish
    else:
        busy, generators = _busy(rows, path)
        receive = mean("publish/seconds")
        if "staleness_threshold" in log.flags:
            ahead = 0.5 + log.flags["staleness_threshold"] * log.flags.get("publish_every", 1)
    running = ahead * responses * per_engine / generators * length / mean("response_length/max")  # the longest runs alone
    running = max(1.0, min(log.flags.get("max_num_seqs", 256), running))
    step = busy / per_engine / (responses * length) * running
    return Times(
        source=f"{len(rows)} steps of {path}",
        step=FIXED * step,
        row=(1 - FIXED) * step / running,
        receive=receive,
        token=max(0.0, learned) * learners / tokens,
        publish=publish,
    )


def _busy(rows: list[dict], path: Path) -> tuple[float, int]:
    """Return (rank-seconds of a step in which the generators of a split run generated, number of generators)."""
    shares = [[share for name, share in row.items() if re.fullmatch("ledger/generator_[0-9]+/generate", name)] for row in rows]
    seconds = [sum(of) * row["timing_s/step"] for of, row in zip(shares, rows, strict=True) if of]
    if not seconds:
        raise UserError(f"--from-run {path}: its generators have reported no times. Take a run of more publishes.")
    return float(np.mean(seconds)), max(map(len, shares))

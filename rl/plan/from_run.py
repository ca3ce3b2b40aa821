"""Service times fitted to what a finished run has recorded: metrics.jsonl knows each phase of each step, not each engine step.

From a run of train_sync.py: the seconds of generation are divided between the steps of the longest response and the tokens of
all. Of a split run only the mean engine step is known, and taken to be the same however many responses run. Training is a fixed
part and one for each token.
"""

import re
from pathlib import Path

import numpy as np

from rl.errors import UserError
from rl.plan.fit import nonnegative
from rl.plan.service_times import EngineTimes, LearnerTimes, ServiceTimes
from rl.report.logs import load

LEARNING = ("old_log_prob", "ref", "adv", "update_actor")


def times_of_run(path: Path) -> ServiceTimes:
    """Raises UserError for a run whose record does not tell."""
    log = load(path)
    rows = [row for row in log.rows if row["step"] not in log.starts and "timing_s/update_actor" in row]
    if len(rows) < 4:
        raise UserError(f"--from-run {path}: {len(rows)} steps with timings after the first are too few to fit; 4 are needed.")
    world = log.config.get("hardware", {}).get("world_size", 1)  # of the learners, if the run was split
    of = lambda name: np.array([row.get(name, 0.0) for row in rows])  # noqa: E731
    responses = log.responses_per_step or 1
    n = log.flags.get("rollout_n", 1)
    answered = of("response_length/mean") * responses
    distinct = answered + of("prompt_length/mean") * responses / n
    waited, generated = of("timing_s/wait"), of("timing_s/gen")
    learned = of("timing_s/step") - waited - generated - of("timing_s/update_weights") - of("timing_s/testing")
    learned = learned - of("timing_s/save_checkpoint")
    step, token = map(float, nonnegative(np.column_stack([np.ones(len(rows)), distinct / world]), learned))
    learner = LearnerTimes(step=step, token=token, publish=float(np.median(of("timing_s/update_weights"))))
    slots = log.flags.get("max_num_seqs", 256)
    if generated.any():
        engines = max(1, world // log.flags.get("rollout_tp", 1))
        decoded = np.maximum(of("response_length/max") - 1, 1)
        columns = np.column_stack([np.maximum(decoded, answered / engines / slots), answered / engines])
        fixed, row = map(float, nonnegative(columns, generated))
        engine = EngineTimes((1, slots), (fixed + row, fixed + row * slots), receive=learner.publish)
    else:
        ahead = 1 + log.flags.get("staleness_threshold", 1.0)  # batches that may be under way
        engines = log.flags.get("generators", 1)
        engine = _of_split(rows, answered, min(slots, round(ahead * responses / engines)), path)
    return ServiceTimes(engine, learner, f"fitted to {path}: {len(rows)} steps")


def _of_split(rows: list[dict], answered: np.ndarray, slots: int, path: Path) -> EngineTimes:
    """The mean engine step, with this many slots in use, from the shares of their time that the generators report as busy."""
    told = []  # of each report: share of busy time, seconds, tokens, engines
    for row, tokens in zip(rows, answered, strict=True):
        if shares := [value for name, value in row.items() if re.fullmatch("ledger/generator_[0-9]+/generate", name)]:
            told.append((np.mean(shares), row["timing_s/step"], tokens, len(shares)))
    if not told:
        raise UserError(f"--from-run {path}: its generators have reported no times. Take a run of more publishes.")
    busy = sum(share * seconds * engines for share, seconds, _, engines in told)  # engine-seconds
    received = [row["publish/seconds"] for row in rows if "publish/seconds" in row]
    step = busy / sum(tokens for _, _, tokens, _ in told) * slots
    return EngineTimes((slots,), (float(step),), receive=float(np.median(received)) if received else 0.0)

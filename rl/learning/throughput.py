"""The throughput of a step (perf/*)."""

from rl.learning.batch import Batch
from rl.ranks.device import memory_gb, peak_flops


def perf_metrics(learner, batch: Batch, seconds: dict[str, float], num_ranks: int, forward_only: float) -> dict[str, float]:
    """Return verl's perf/*: throughput in tokens (prompt + response) per second and rank of the job, over a step's `seconds` by
    phase; MFU of the update, which computes each prompt once, if the device's peak is known; peak memory. learner: a Learner;
    forward_only: the part of the tokens without a backward pass."""
    tokens, step_seconds = sum(batch.total_lengths), sum(seconds.values())
    out = {"perf/total_num_tokens": tokens, "perf/time_per_step": step_seconds} | memory_gb()
    out["perf/throughput"] = tokens / step_seconds / num_ranks
    if (peak := peak_flops()) and seconds.get("update_actor"):
        from rl.learning.flops import flops_of_step  # late: a CPU's peak is not known

        flops = flops_of_step(learner, batch, forward_only)
        out["perf/mfu/actor"] = flops / seconds["update_actor"] / peak / learner.ranks.world_size
    return out

"""The metrics of a step whose samples may be stale. docs/metrics.md explains each."""

import numpy as np
import torch

from rl.algorithm.whole_batch import PIECE, sum_over_ranks
from rl.learning.batch import Batch

OLDEST_SHOWN = 8  # the histogram of ages ends here


def staleness_metrics(batch: Batch, version: int) -> dict[str, float]:
    """Return the ages of a step's sampled tokens in versions, under verl's names if there are any; empty for a batch without
    sampled tokens. version: the one that the step begins with."""
    has_tokens = batch.sampled_lengths > 0
    tokens = int(batch.sampled_lengths.sum())
    if not tokens:
        return {}
    versions = batch.version[batch.mask] if batch.is_masked else batch.version
    lengths = torch.where(batch.local_lengths > 0, batch.sampled_lengths, 0)  # of the responses that are here
    here = lengths > 0
    ages = torch.zeros(2, len(batch.lengths), dtype=torch.long)  # of each response's oldest and newest token
    if here.any():
        starts = (lengths.cumsum(0) - lengths)[here].numpy()
        for age, least_or_most in zip(ages, (np.minimum, np.maximum), strict=True):
            age[here] = torch.from_numpy(version - least_or_most.reduceat(versions.numpy(), starts)).long()
    oldest, newest = sum_over_ranks(batch, ages)[:, has_tokens]
    span = oldest - newest
    stale = oldest > 0
    total, counts = torch.zeros((), dtype=torch.long), torch.zeros(OLDEST_SHOWN + 1, dtype=torch.long)
    for part in versions.split(PIECE):
        age = version - part
        total += age.sum()
        counts += torch.bincount(age.clamp_(0, OLDEST_SHOWN), minlength=len(counts))
    total, *counts = sum_over_ranks(batch, torch.stack([total, *counts])).tolist()
    out = {
        "fully_async/count/stale_samples_processed": len(batch.group[has_tokens][stale].unique()),
        "fully_async/count/stale_trajectory_processed": int(stale.sum()),
        "fully_async/partial/total_partial_num": int((span > 0).sum()),
        "fully_async/partial/partial_ratio": int((span > 0).sum()) / len(batch.lengths),
        "fully_async/partial/max_partial_span": int(span.max()),
        "staleness/max": int(oldest.max()),
        "staleness/mean": total / tokens,
    }
    out |= {f"staleness/age_{n}": count / tokens for n, count in enumerate(counts)}
    out[f"staleness/age_{OLDEST_SHOWN}_or_more"] = out.pop(f"staleness/age_{OLDEST_SHOWN}")
    return out

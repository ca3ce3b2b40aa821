"""The metrics of a step. docs/metrics.md explains each.

Left out: recording them (rl/record/run.py) and timing (rl/ranks/timers.py).
"""

import math
from itertools import chain

import numpy as np
import torch

from rl.learning.batch import PIECE, Batch

OLDEST_SHOWN = 8  # the histogram of ages ends here


def summarize(prefix: str, values: torch.Tensor) -> dict[str, float]:
    """Return {prefix/mean, prefix/max, prefix/min} of a tensor of any shape, which verl reports for most quantities; NaN if it
    is empty."""
    values = values.double()
    found = dict.fromkeys(("mean", "max", "min"), math.nan)
    if values.numel():
        found = {"mean": float(values.mean()), "max": float(values.max()), "min": float(values.min())}
    return {f"{prefix}/{name}": value for name, value in found.items()}


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return verl's metrics of a batch: scores, advantages, rewards and lengths."""
    out = summarize("critic/score", batch.score) | _advantage_metrics(batch)
    out |= summarize("critic/rewards", batch.sum_over_ranks(batch.by_response(batch.targets.reward)))
    out |= summarize("response_length", batch.lengths)
    out["response_length/clip_ratio"] = float(batch.truncated.double().mean())
    if batch.is_masked:
        out |= summarize("response_length/trained", batch.sampled_lengths)
    out |= summarize("prompt_length", torch.tensor([len(p) for p in batch.prompts]))
    out["reward/unscored"] = batch.unscored
    return out | {f"reward/extra/{name}/mean": mean for name, mean in _means(batch.extra).items()}


def _means(extras: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the responses that have it, ordered by name. extras: each response's numbers."""
    values = {name: [extra[name] for extra in extras if name in extra] for name in sorted({*chain.from_iterable(extras)})}
    return {name: sum(its) / len(its) for name, its in values.items()}


def _advantage_metrics(batch: Batch) -> dict[str, float]:
    """Return critic/advantages/* over the trained tokens; NaN if there are none."""
    own = [0, 0.0, -math.inf, math.inf]  # count, sum, largest, smallest
    for mask, advantage in zip(batch.trained.split(PIECE), batch.targets.advantage.split(PIECE), strict=True):
        trained = advantage if mask.all() else advantage[mask]
        if len(trained):
            low, high = torch.aminmax(trained)
            more = len(trained), float(trained.sum(dtype=torch.float64))
            own = [own[0] + more[0], own[1] + more[1], max(own[2], float(high)), min(own[3], float(low))]
    counts, totals, highest, lowest = zip(*batch.of_each_rank(own), strict=True)
    count = sum(counts)
    total = sum(totals)
    most = max(highest)
    least = min(lowest)
    values = {"mean": total / count, "max": most, "min": least} if count else dict.fromkeys(("mean", "max", "min"), math.nan)
    return {f"critic/advantages/{name}": value for name, value in values.items()}


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
    oldest, newest = batch.sum_over_ranks(ages)[:, has_tokens]
    span = oldest - newest
    stale = oldest > 0
    total, counts = torch.zeros((), dtype=torch.long), torch.zeros(OLDEST_SHOWN + 1, dtype=torch.long)
    for part in versions.split(PIECE):
        age = version - part
        total += age.sum()
        counts += torch.bincount(age.clamp_(0, OLDEST_SHOWN), minlength=len(counts))
    total, *counts = batch.sum_over_ranks(torch.stack([total, *counts])).tolist()
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


def validation_metrics(rows: list[dict]) -> dict[str, float]:
    """Return verl's val-core/<data_source>/acc/mean@n and pass@n (the best of the n), averaged over the prompts of each source,
    and the number of responses that could not be scored. These count as wrong: 0, or the worst score of their source here if
    that is below 0. Also return verl's val-aux/<data_source>/<name>/mean@n of each further number of the reward function: its
    mean over the responses that have it. rows: one per response, as `Generator.take_rows` describes them. Every name begins
    with "val-": by that the record distinguishes a validation's metrics from a step's."""
    metrics = {"val-aux/reward/unscored": sum(row["error"] is not None for row in rows)}
    for source, its in _by_source(rows).items():
        worst = min([0.0, *(row["acc"] for row in its if row["error"] is None)])
        by_prompt: dict[int, list[float]] = {}
        for row in its:
            by_prompt.setdefault(row["index"], []).append(row["acc"] if row["error"] is None else worst)
        prompts = list(by_prompt.values())
        n = len(prompts[0])
        metrics[f"val-core/{source}/acc/mean@{n}"] = sum(sum(acc) / n for acc in prompts) / len(prompts)
        if n > 1:
            metrics[f"val-core/{source}/acc/pass@{n}"] = sum(max(acc) for acc in prompts) / len(prompts)
        extras = [row.get("extra", {}) for row in its]  # none in a checkpoint of an older version
        metrics |= {f"val-aux/{source}/{name}/mean@{n}": mean for name, mean in _means(extras).items()}
    return metrics


def hardly_scored(rows: list[dict]) -> list[str]:
    """Return the data sources of a validation in which less than half of the responses could be scored. Their mean mostly
    reflects the score of failures, which may be better than any true score: it must not choose the best checkpoint."""
    return [source for source, its in _by_source(rows).items() if 2 * sum(row["error"] is not None for row in its) > len(its)]


def _by_source(rows: list[dict]) -> dict[str, list[dict]]:
    out: dict[str, list[dict]] = {}
    for row in rows:
        out.setdefault(row["data_source"], []).append(row)
    return out

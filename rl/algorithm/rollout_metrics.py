"""Metrics of the difference between generator and learner, with verl's names and definitions. They are reported with or without
a rollout correction, because they show whether one is needed.

Everything is computed one piece at a time, of whole responses and small enough for a processor's cache: for millions of tokens
that is several times as fast as one operation on all of them after another, and takes no memory.
"""

import math
from collections import Counter

import torch
from torch import Tensor

from losses import bounded
from rl.algorithm.rollout_correction import Bounds, RolloutCorrectionArgs
from rl.learning.batch import Batch, pieces

PER_RESPONSE = ("training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl")
PER_RESPONSE += ("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq")
CONSTANT = 1e-12  # variance over mean square below which a probability is constant


def rollout_metrics(args: RolloutCorrectionArgs, batch: Batch) -> dict[str, float]:
    """Return the metrics of the tokens whose log-probs under the learner are known, including rejected ones.

    rollout_is_*: of the weights at the level of --rollout-is, or those that --rollout-is token would apply, before
    normalisation; at the sequence levels, max and min are before the cap. eff_sample_size = (mean w)^2 / mean w^2.
    ratio_fraction_high / low: the share of tokens, or of responses at the sequence levels, whose unbounded weight is above the
    cap (or band), or below its inverse (or the band). rollout_rs_masked_fraction: the share of tokens that are rejected;
    rollout_rs_seq_masked_fraction: the share of responses that lose any. kl, k3_kl: KL(generator || learner) by k1 and k3;
    chi2: mean w^2 - 1 by token and by response; *_ppl: per response, then averaged. The correlation is of the probabilities,
    rollout_probs_diff_* of their difference at tokens that are not rejected. A collective.
    """
    level = args.rollout_is or "token"
    targets = batch.targets
    sums, most = Counter(), Counter()
    for piece in pieces(batch.seq):
        learner = targets.actor_log_prob[piece]
        rejected = targets.rejected
        xs = [learner, batch.rollout_log_prob[piece], batch.seq[piece]]
        xs += [] if rejected is None else [rejected[piece]]
        known = batch.mask[piece] & ~learner.isnan()
        if not known.all():  # to select takes longer than all the rest
            xs = [x[known] for x in xs]
        if len(xs[0]):
            _add(sums, most, level, args.weight_bounds, *xs)
    totals, extremes = Counter(), Counter()
    for of_rank, most_of_rank in batch.of_each_rank([sums, most]):
        totals.update(of_rank)
        _raise(extremes, **most_of_rank)
    return _metrics(totals, extremes, targets.rejected is not None)


def _add(
    sums: Counter,
    most: Counter,
    level: str,
    bounds: Bounds,
    lp: Tensor,
    roll: Tensor,
    seq: Tensor,
    rejected: Tensor | None = None,
) -> None:
    """Add a piece of whole responses, [n] each: the learner's and the generator's log-probs, the response of each token, and
    whether it is rejected."""
    counts = torch.unique_consecutive(seq, return_counts=True)[1]  # [b] tokens of each response
    by_response = lambda x: torch.segment_reduce(x, "sum", lengths=counts)  # noqa: E731
    log_ratio = (lp - roll).clamp_(-20, 20)
    ratio = log_ratio.exp()
    of_response = by_response(log_ratio)
    of_sequence = of_response.clamp(-20, 20)
    sums.update(tokens=len(lp), responses=len(counts))
    sums.update(_sums(kl=-of_response, chi2_seq=(2 * of_sequence).exp()))
    sums.update(_sums(k3_kl=ratio - log_ratio - 1, chi2_token=ratio * ratio))
    sums.update(_perplexities(-by_response(lp) / counts, -by_response(roll) / counts))
    # a unit has one weight; times: its tokens
    units = ratio
    times = None
    if level != "token":
        units = (of_sequence if level == "sequence" else of_response / counts).exp()
        times = counts
    _add_weights(sums, most, units, times, *bounds)
    p = lp.exp().double()
    q = roll.exp().double()
    sums.update(_sums(p=p, q=q, pp=p.dot(p), pq=p.dot(q), qq=q.dot(q)))
    difference = p.sub_(q).abs_()
    if rejected is not None:
        sums.update(_sums(rejected=rejected, touched=by_response(rejected.to(lp.dtype)) > 0))
        difference = difference[~rejected]
    sums.update(_sums(difference=difference, squares=difference.dot(difference)), compared=len(difference))
    if len(difference):
        _raise(most, difference=difference.max())


def _add_weights(sums: Counter, most: Counter, units: Tensor, times: Tensor | None, low: float | None, high: float) -> None:
    """Add the weights [u] of a piece's tokens (times is None), or of its responses."""
    weight = bounded(units, low, high)
    off = weight.double() - 1  # small numbers keep their digits when they are squared
    weighted = off if times is None else off * times
    sums.update(_sums(off=weighted, off_squares=off.dot(weighted)), units=len(units))
    sums.update(_sums(high=units > high, low=units < (1 / high if low is None else low)))
    least, largest = torch.aminmax(weight if times is None else units)
    _raise(most, weight=largest, minus_weight=-least)


def _perplexities(training: Tensor, rollout: Tensor) -> dict[str, float]:
    """training, rollout [b]: each response's mean negative log-prob under learner and generator."""
    gap = training - rollout
    ppl = {"training_ppl": training.clamp(max=50).exp(), "rollout_ppl": rollout.clamp(max=50).exp()}
    ppl |= {"training_log_ppl": training, "rollout_log_ppl": rollout, "ppl_ratio": gap.clamp(-50, 50).exp()}
    return _sums(**ppl, log_ppl_diff=gap, log_ppl_abs_diff=gap.abs())


def _sums(**values: Tensor) -> dict[str, float]:
    return {name: float(x.count_nonzero() if x.dtype == torch.bool else x.sum()) for name, x in values.items()}


def _raise(most: Counter, **values: Tensor | float) -> None:
    for name, value in values.items():
        most[name] = max(most.get(name, -math.inf), float(value))


def _metrics(sums: Counter, most: Counter, rejects: bool) -> dict[str, float]:
    n, compared = sums["tokens"], sums["compared"]
    out = {"mean": math.nan, "max": math.nan, "std": math.nan}
    if compared:
        mean = sums["difference"] / compared
        squares = max(0.0, sums["squares"] - compared * mean**2)
        out = {"mean": mean, "max": most["difference"], "std": math.sqrt(squares / max(1, compared - 1))}
    out = {f"training/rollout_probs_diff_{name}": value for name, value in out.items()}
    if not n:
        return out
    off = sums["off"] / n
    variance = max(0.0, sums["off_squares"] / n - off**2)
    mean = 1 + off
    own = {"rollout_is_mean": mean, "rollout_is_std": math.sqrt(variance)}
    own |= {"rollout_is_min": -most["minus_weight"], "rollout_is_max": most["weight"]}
    own["rollout_is_eff_sample_size"] = mean**2 / max(mean**2 + variance, 1e-30)
    own |= {f"rollout_is_ratio_fraction_{name}": sums[name] / sums["units"] for name in ("high", "low")}
    own |= {name: sums[name] / sums["responses"] for name in PER_RESPONSE}
    own |= {name: sums[name] / n for name in ("kl", "k3_kl", "chi2_token")}
    own |= {name: own[name] - 1 for name in ("chi2_token", "chi2_seq")}
    if rejects:
        own["rollout_rs_masked_fraction"] = sums["rejected"] / n
        own["rollout_rs_seq_masked_fraction"] = sums["touched"] / sums["responses"]
    out |= {f"rollout_corr/{name}": value for name, value in own.items()}
    return out | {"training/rollout_actor_probs_pearson_corr": _correlation(sums)}


def _correlation(sums: Counter) -> float:
    """Return the correlation of the two probabilities; 0 if one is constant."""
    p, q, pp, pq, qq = (sums[name] / sums["tokens"] for name in ("p", "q", "pp", "pq", "qq"))
    of_p, of_q = pp - p * p, qq - q * q
    if not (of_p > CONSTANT * pp and of_q > CONSTANT * qq):
        return 0.0
    return (pq - p * q) / math.sqrt(of_p * of_q)

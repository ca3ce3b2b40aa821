"""The distance between generator and learner, under verl's names and in its sense. It is reported with or without a rollout
correction, because it shows whether one is needed."""

import torch
from torch import Tensor

from losses import bounded, rollout_log_ratio, rollout_ratio, sequence_means, sequence_sum, trained_sequences
from rl.batch import Batch
from rl.rollout_correction import Bounds, RolloutCorrectionArgs


def rollout_metrics(args: RolloutCorrectionArgs, batch: Batch) -> dict[str, float]:
    """The metrics of the tokens whose log-probs under the learner are known, before any was rejected. Without --rollout-is
    rollout_is_* are of the weights that --rollout-is token would apply."""
    rejected = torch.zeros_like(batch.mask) if batch.rejected is None else batch.rejected
    known = (batch.mask | rejected) & ~batch.actor_log_prob.isnan()
    inputs = (batch.actor_log_prob, batch.rollout_log_prob, known, batch.seq)
    out = None if batch.rejected is None else known & rejected
    return compare(*inputs, level=args.weight_level or "token", bounds=args.weight_bounds, rejected=out)


def compare(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    seq: Tensor,
    *,
    level: str = "token",
    bounds: Bounds = (None, 2.0),
    rejected: Tensor | None = None,
) -> dict[str, float]:
    """Tensors [N] of the global batch -> metrics; none without trained tokens.

    rollout_is_*: of the weights at `level` as applied, but before they are normalised, over trained tokens; at the sequence
    levels max and min are before the cap. eff_sample_size = (mean w)^2 / mean w^2. ratio_fraction_high / low, of tokens, or at
    the sequence levels of responses: weights above the cap (the band), below its inverse (the band), before either.
    rollout_rs_masked_fraction: of trained tokens, those that are `rejected`; rollout_rs_seq_masked_fraction: of responses with
    trained tokens, those that lose any. kl, k3_kl: KL(generator || learner) by k1 and k3; chi2: mean w^2 - 1 by token and by
    response; *_ppl: per response, then averaged. The correlation is of the probabilities.
    """
    if not mask.any():
        return {}
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    lp, roll = (torch.where(mask, x.detach(), 0.0).to(dtype) for x in (log_prob, rollout_log_prob))
    lr = rollout_log_ratio(lp, roll, mask)
    metrics = _weight_metrics(rollout_ratio(lp, roll, mask, seq, level), mask, seq, level, bounds)
    metrics |= _perplexity_metrics(lp, roll, mask, seq)
    sums = sequence_sum(lr, seq).clamp(-20, 20)[trained_sequences(mask, seq)]
    metrics |= {
        "kl": -lr[mask].mean(),
        "k3_kl": (lr.exp() - lr - 1)[mask].mean(),
        "chi2_token": (2 * lr[mask]).exp().mean() - 1,
        "chi2_seq": (2 * sums).exp().mean() - 1,
    }
    if rejected is not None:
        touched = len(trained_sequences(rejected & mask, seq))
        metrics["rollout_rs_masked_fraction"] = (rejected & mask).sum() / mask.sum()
        metrics["rollout_rs_seq_masked_fraction"] = touched / len(trained_sequences(mask, seq))
    result = {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}
    return result | {"training/rollout_actor_probs_pearson_corr": _pearson(lp[mask].exp(), roll[mask].exp())}


def _weight_metrics(ratio: Tensor, mask: Tensor, seq: Tensor, level: str, bounds: Bounds) -> dict[str, Tensor]:
    """ratio [N]: the weights before any bound."""
    low, high = bounds
    weight = bounded(ratio, low, high)[mask]
    by_unit = ratio[mask] if level == "token" else sequence_means(mask, seq, ratio)[0][trained_sequences(mask, seq)]
    least_and_most = weight if level == "token" else by_unit
    return {
        "rollout_is_mean": weight.mean(),
        "rollout_is_std": weight.std(correction=0),
        "rollout_is_min": least_and_most.min(),
        "rollout_is_max": least_and_most.max(),
        "rollout_is_eff_sample_size": weight.mean().square() / weight.square().mean().clamp(min=1e-30),
        "rollout_is_ratio_fraction_high": (by_unit > high).to(weight.dtype).mean(),
        "rollout_is_ratio_fraction_low": (by_unit < (1 / high if low is None else low)).to(weight.dtype).mean(),
    }


def _perplexity_metrics(lp: Tensor, roll: Tensor, mask: Tensor, seq: Tensor) -> dict[str, Tensor]:
    rows = trained_sequences(mask, seq)
    training, rollout = (-mean[rows] for mean in sequence_means(mask, seq, lp, roll))
    return {
        "training_ppl": training.clamp(max=50).exp().mean(),
        "rollout_ppl": rollout.clamp(max=50).exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": (training - rollout).mean(),
        "log_ppl_abs_diff": (training - rollout).abs().mean(),
        "ppl_ratio": (training - rollout).clamp(-50, 50).exp().mean(),
    }


def _pearson(x: Tensor, y: Tensor) -> float:
    """Correlation of two [N]; 0 if one is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = x.norm() * y.norm()
    return float((x * y).sum() / scale) if scale > 0 else 0.0

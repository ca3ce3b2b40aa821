"""Metrics of the difference between generator and learner, with verl's names and definitions. They are reported with or without
a rollout correction, because they show whether one is needed.

Everything is computed one piece at a time, of whole responses and small enough for a processor's cache: for millions of tokens
that is several times as fast as one operation on all of them after another, and takes no memory. Sums of pieces are added in
float64.
"""

import math
from collections import Counter

import torch
from torch import Tensor

from losses import bounded
from rl.algorithm.rollout_correction import Bounds, RolloutCorrectionArgs
from rl.learning.batch import Batch, pieces


def rollout_metrics(args: RolloutCorrectionArgs, batch: Batch) -> dict[str, float]:
    """Return the metrics of the tokens whose log-probs under the learner are known, including rejected ones. Without
    --rollout-is, rollout_is_* describe the weights that --rollout-is token would apply. training/rollout_probs_diff_*: the
    difference of the two probabilities of trained tokens."""
    totals = _Totals(args.rollout_is or "token", args.weight_bounds)
    targets = batch.targets
    for piece in pieces(batch.seq):
        learner = targets.actor_log_prob[piece]
        rejected = None if targets.rejected is None else targets.rejected[piece]
        known = batch.mask[piece] & ~learner.isnan()
        totals.add(learner, batch.rollout_log_prob[piece], known, batch.seq[piece], rejected)
    if batch.ranks:
        totals = _Totals.together(totals.level, totals.bounds, batch.of_each_rank(totals.state()))
    return totals.metrics() | totals.differences()


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
    """Return the metrics of tensors [N] of the global batch; none without trained tokens.

    rollout_is_*: of the weights of trained tokens at `level` as applied, but before normalisation; at the sequence levels, max
    and min are before the cap. eff_sample_size = (mean w)^2 / mean w^2. ratio_fraction_high / low: the share of tokens, or of
    responses at the sequence levels, whose unbounded weight is above the cap (or band), or below its inverse (or the band).
    rollout_rs_masked_fraction: the share of trained tokens that are `rejected`; rollout_rs_seq_masked_fraction: the share of
    responses with trained tokens that lose any. kl, k3_kl: KL(generator || learner) by k1 and k3; chi2: mean w^2 - 1 by token
    and by response; *_ppl: per response, then averaged. The correlation is of the probabilities.
    """
    totals = _Totals(level, bounds)
    for piece in pieces(seq):
        of_piece = (x[piece] for x in (log_prob.detach(), rollout_log_prob.detach(), mask, seq))
        totals.add(*of_piece, None if rejected is None else rejected[piece])
    return totals.metrics()


MOMENTS = ("weight", "difference", "probabilities")


class _Totals:
    """The sums over pieces from which the metrics are computed."""

    def __init__(self, level: str, bounds: Bounds):
        self.level, self.bounds = level, bounds
        self.rejects = False
        self.sums: Counter[str] = Counter()  # over tokens, responses, or the level's units
        self.least, self.most = math.inf, -math.inf  # of the weights
        self.weight, self.difference = Moments(1), Moments(1)
        self.probabilities = Moments(2)
        self.largest_difference = -math.inf

    @staticmethod
    def together(level: str, bounds: Bounds, states: list[dict]) -> "_Totals":
        """Merge the `state` of several, as read from JSON."""
        out = _Totals(level, bounds)
        for state in states:
            out.rejects = out.rejects or state["rejects"]
            out.sums.update(state["sums"])
            out.least, out.most = min(out.least, state["least"]), max(out.most, state["most"])
            out.largest_difference = max(out.largest_difference, state["largest_difference"])
            for name in MOMENTS:
                getattr(out, name).merge(*state[name])
        return out

    def state(self) -> dict:
        names = ("rejects", "sums", "least", "most", "largest_difference")
        return {name: getattr(self, name) for name in names} | {name: getattr(self, name).state() for name in MOMENTS}

    def add(self, lp: Tensor, roll: Tensor, mask: Tensor, seq: Tensor, rejected: Tensor | None) -> None:
        """Add a piece of whole responses, [n] each."""
        self.rejects = self.rejects or rejected is not None
        dtype = torch.promote_types(lp.dtype, torch.float32)
        whole = bool(mask.all())  # then nothing is selected, which would take longer than all the rest
        take = (lambda x: x) if whole else (lambda x: x[mask])
        lp, roll, seq = take(lp).to(dtype), take(roll).to(dtype), take(seq)
        rejected = None if rejected is None else take(rejected)
        if not len(lp):
            return
        counts = torch.unique_consecutive(seq, return_counts=True)[1]  # [b] trained tokens of each response with any
        by_response = lambda x: torch.segment_reduce(x, "sum", lengths=counts)  # noqa: E731
        lr = (lp - roll).clamp_(-20, 20)
        ratio, of_response = lr.exp(), by_response(lr)
        sums = of_response.clamp(-20, 20)
        self._sum(tokens=len(lr), responses=len(counts), kl=-of_response, k3_kl=ratio - lr - 1, chi2_token=ratio * ratio)
        self._sum(chi2_seq=(2 * sums).exp())
        if rejected is not None:
            lost = by_response(rejected.to(dtype))
            self._sum(rejected=rejected, touched=lost > 0)
        self._add_weights(ratio, counts, sums if self.level == "sequence" else of_response / counts)
        self._add_perplexities(-by_response(lp) / counts, -by_response(roll) / counts)
        self._add_probabilities(lp.exp(), roll.exp(), rejected)

    def _sum(self, **values: Tensor | int) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = float(value.count_nonzero() if value.dtype == torch.bool else value.sum())
            self.sums[name] += value

    def _add_weights(self, ratio: Tensor, counts: Tensor, log_of_response: Tensor) -> None:
        """ratio [n]: at the token level; log_of_response [b]: the logarithm of each response's ratio."""
        low, high = self.bounds
        units = ratio if self.level == "token" else log_of_response.exp()
        weight = bounded(units, low, high)
        least, most = torch.aminmax(weight if self.level == "token" else units)
        self.least, self.most = min(self.least, float(least)), max(self.most, float(most))
        self._sum(units=len(units), high=units > high, low=units < (1 / high if low is None else low))
        self.weight.add(weight, counts=None if self.level == "token" else counts)

    def _add_perplexities(self, training: Tensor, rollout: Tensor) -> None:
        """training, rollout [b]: each response's mean negative log-prob under learner and generator."""
        gap = training - rollout
        self._sum(training_ppl=training.clamp(max=50).exp(), rollout_ppl=rollout.clamp(max=50).exp())
        self._sum(training_log_ppl=training, rollout_log_ppl=rollout, log_ppl_diff=gap, log_ppl_abs_diff=gap.abs())
        self._sum(ppl_ratio=gap.clamp(-50, 50).exp())

    def _add_probabilities(self, p: Tensor, q: Tensor, rejected: Tensor | None) -> None:
        """p, q [n]: the learner's and the generator's probabilities."""
        self.probabilities.add(p, q)
        difference = p.sub_(q).abs_()
        difference = difference if rejected is None else difference[~rejected]
        if len(difference):
            self.difference.add(difference)
            self.largest_difference = max(self.largest_difference, float(difference.max()))

    def metrics(self) -> dict[str, float]:
        """Return the metrics that `compare` describes."""
        sums = self.sums
        if not sums["tokens"]:
            return {}
        over = lambda unit, *names: {name: sums[name] / sums[unit] for name in names}  # noqa: E731
        ((mean,), ((squares,),)), n = self.weight.result(), sums["tokens"]
        out = {"rollout_is_mean": mean, "rollout_is_std": math.sqrt(squares / n)}
        out |= {"rollout_is_min": self.least, "rollout_is_max": self.most}
        out |= {"rollout_is_eff_sample_size": mean**2 / max(mean**2 + squares / n, 1e-30)}
        out |= {f"rollout_is_ratio_fraction_{name}": part for name, part in over("units", "high", "low").items()}
        out |= over("responses", "training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl", "log_ppl_diff")
        out |= over("responses", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq") | over("tokens", "kl", "k3_kl", "chi2_token")
        out |= {name: out[name] - 1 for name in ("chi2_token", "chi2_seq")}
        if self.rejects:
            out |= {"rollout_rs_masked_fraction": sums["rejected"] / n}
            out |= {"rollout_rs_seq_masked_fraction": sums["touched"] / sums["responses"]}
        _, ((xx, xy), (_, yy)) = self.probabilities.result()
        out = {f"rollout_corr/{name}": float(value) for name, value in out.items()}
        correlation = xy / math.sqrt(xx * yy) if xx * yy > 0 else 0.0  # 0 if one is constant
        return out | {"training/rollout_actor_probs_pearson_corr": correlation}

    def differences(self) -> dict[str, float]:
        """Return training/rollout_probs_diff_*; NaN without any trained token."""
        n = self.difference.n
        ((mean,), ((squares,),)) = self.difference.result() if n else ((math.nan,), ((math.nan,),))
        values = {"mean": mean, "max": self.largest_difference if n else math.nan, "std": math.sqrt(squares / max(1, n - 1))}
        return {f"training/rollout_probs_diff_{name}": value for name, value in values.items()}


class Moments:
    """The means of k variables and the sums of products of distances from them, piece by piece: those of each piece are merged
    without the loss of digits that sums of squares would have (Chan, Golub and LeVeque, 1979)."""

    def __init__(self, k: int):
        self.n, self._mean = 0, [0.0] * k
        self._products = [[0.0] * k for _ in range(k)]

    def add(self, *xs: Tensor, counts: Tensor | None = None) -> None:
        """Add values xs, [n] each. counts [n]: how often each value counts, by default once."""
        weigh = (lambda x: x) if counts is None else (lambda x: x * counts)
        n = len(xs[0]) if counts is None else int(counts.sum())
        mean = [weigh(x).sum() / n for x in xs]
        apart = [x - m for x, m in zip(xs, mean, strict=True)]
        products = [[float(weigh(a * b).sum()) if i <= j else 0.0 for j, b in enumerate(apart)] for i, a in enumerate(apart)]
        self.merge(n, list(map(float, mean)), products)

    def merge(self, n: int, mean: list[float], products: list[list[float]]) -> None:
        """Merge another's `state`. Only products on and above the diagonal are read."""
        total, delta = self.n + n, [m - was for m, was in zip(mean, self._mean, strict=True)]
        if not n:
            return
        for i in range(len(mean)):
            for j in range(i, len(mean)):
                self._products[i][j] += products[i][j] + delta[i] * delta[j] * self.n * n / total
                self._products[j][i] = self._products[i][j]
        self._mean = [was + d * n / total for was, d in zip(self._mean, delta, strict=True)]
        self.n = total

    def state(self) -> tuple[int, list[float], list[list[float]]]:
        return self.n, self._mean, self._products

    def result(self) -> tuple[list[float], list[list[float]]]:
        """Return the means [k], and the sums of products of distances [k, k]."""
        return self._mean, self._products

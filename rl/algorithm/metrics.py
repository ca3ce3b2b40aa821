"""The metrics of a step, and the fates of its responses. docs/metrics.md explains each.

    data/<source>/trained      a token was trained
    data/<source>/rejected     the rollout correction left no token
    data/<source>/unscored     it could not be scored
    data/<source>/masked       the policy sampled none of its tokens; only if some are masked
    data/<source>/filtered     its prompt was replaced by --filter-groups
    data/<source>/dropped      its prompt was dropped as too old (--max-staleness)

Each response of a prompt that was started and settled is in exactly one of these counts of one step. Left out: recording
(rl/record/run.py) and timing (rl/ranks/timers.py).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from losses import bounded
from rl.algorithm import whole_batch
from rl.algorithm.args import Bounds, RolloutCorrectionArgs
from rl.algorithm.whole_batch import PIECE, by_response, mean_of_responses, pieces, sum_over_ranks
from rl.data.prompts import PromptDataset, PromptOrder
from rl.learning.batch import Batch
from rl.ranks.device import memory_gb, peak_flops
from rl.ranks.dist import all_gather_values


def of_each_rank(batch: Batch, value: Any) -> list:
    """Return a value for JSON from each learner that shares the batch, in their order. A collective."""
    return all_gather_values(value, batch.ranks.data_group) if batch.ranks else [value]


def summarize(prefix: str, values: torch.Tensor) -> dict[str, float]:
    """Return prefix/mean, prefix/max and prefix/min of a tensor of any shape, as verl does; NaN if it is empty."""
    values = values.double()
    found = dict.fromkeys(("mean", "max", "min"), math.nan)
    if values.numel():
        found = {"mean": float(values.mean()), "max": float(values.max()), "min": float(values.min())}
    return {f"{prefix}/{name}": value for name, value in found.items()}


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return verl's metrics of a batch: scores, advantages, rewards and lengths. A collective."""
    out = summarize("critic/score", batch.score) | _advantage_metrics(batch)
    out |= summarize("critic/rewards", sum_over_ranks(batch, by_response(batch, batch.targets.reward)))
    out |= summarize("response_length", batch.lengths)
    out["response_length/clip_ratio"] = float(batch.truncated.double().mean())
    if batch.is_masked:
        out |= summarize("response_length/trained", batch.sampled_lengths)
    out |= summarize("prompt_length", torch.tensor(batch.prompt_lengths))
    out["reward/unscored"] = batch.unscored
    if batch.targets.kl is not None:
        out["actor/reward_kl_penalty"] = mean_of_responses(batch.targets.kl, batch)
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
            low, high = map(float, torch.aminmax(trained))
            total = float(trained.sum(dtype=torch.float64))
            own = [own[0] + len(trained), own[1] + total, max(own[2], high), min(own[3], low)]
    counts, totals, highest, lowest = zip(*of_each_rank(batch, own), strict=True)
    count = sum(counts)
    values = (sum(totals) / count, max(highest), min(lowest)) if count else 3 * [math.nan]
    return {f"critic/advantages/{name}": value for name, value in zip(("mean", "max", "min"), values, strict=True)}


def validation_metrics(rows: list[dict]) -> dict[str, float]:
    """Return verl's val-core/<data_source>/acc/mean@n, maj@n/mean (`majority`) and pass@k (best of k: 2, 4, ... n), averaged
    over the prompts of each source, and the number of responses that could not be scored. These count as wrong: 0, or the worst
    score of their source here if that is below 0. Also return verl's val-aux/<data_source>/<name>/mean@n of each further number
    of the reward function: its mean over the responses that have it; and val-aux/env/<name>/acc/mean@n of each environment that
    has a name. rows: one per response, as `Generator.take_rows` describes them. Every name begins with "val-": by that the
    record distinguishes a validation's metrics from a step's."""
    metrics = {"val-aux/reward/unscored": sum(row["error"] is not None for row in rows)}
    for source, n, its in _by_source_and_n(rows):
        prompts = _accuracies(its)
        metrics[f"val-core/{source}/acc/mean@{n}"] = _mean_of(prompts)
        for k in [2**power for power in range(1, 31) if 2**power < n] + [n] * (n > 1):
            metrics[f"val-core/{source}/acc/pass@{k}"] = sum(best_of(acc, k) for acc in prompts) / len(prompts)
        if n > 1 and any(row.get("pred") is not None for row in its):
            votes = [[row.get("pred") for row in of_prompt] for of_prompt in _by("index", its).values()]
            metrics[f"val-core/{source}/acc/maj@{n}/mean"] = sum(map(majority, votes, prompts)) / len(prompts)
        extras = [row.get("extra", {}) for row in its]  # none in a checkpoint of an older version
        metrics |= {f"val-aux/{source}/{name}/mean@{n}": mean for name, mean in _means(extras).items()}
    for name, its in _by("environment", rows).items():
        prompts = _accuracies(its)
        metrics |= {f"val-aux/env/{name}/acc/mean@{len(prompts[0])}": _mean_of(prompts)} if name else {}
    return metrics


def _by_source_and_n(rows: list[dict]) -> Iterator[tuple[str, int, list[dict]]]:
    """Yield the rows of each source; of one whose files have different numbers of responses to a prompt, by this number n."""
    for source, its in _by("data_source", rows).items():
        count = Counter(row["index"] for row in its)
        for n in sorted({*count.values()}):
            yield source, n, [row for row in its if count[row["index"]] == n]


def _accuracies(rows: list[dict]) -> list[list[float]]:
    """Return the accuracies of each prompt's responses."""
    worst = min([0.0, *(row["acc"] for row in rows if row["error"] is None)])
    return [[row["acc"] if row["error"] is None else worst for row in its] for its in _by("index", rows).values()]


def best_of(accuracies: list[float], k: int) -> float:
    """Return the expected best of k of these n, drawn without replacement: pass@k (arXiv 2107.03374) if each is 0 or 1."""
    n = len(accuracies)
    ways = [math.comb(place, k - 1) for place in range(n)]  # in which the value in this place is the best of k
    return sum(way * acc for way, acc in zip(ways, sorted(accuracies), strict=True)) / math.comb(n, k)


def majority(answers: list[str | None], accuracies: list[float]) -> float:
    """Return the mean accuracy of the responses with the most frequent answer, or answers. None is no vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    chosen = [acc for answer, acc in zip(answers, accuracies, strict=True) if votes[answer] == most]
    return sum(chosen) / len(chosen)


def _mean_of(prompts: list[list[float]]) -> float:
    return sum(sum(acc) / len(acc) for acc in prompts) / len(prompts)


def hardly_scored(rows: list[dict]) -> list[str]:
    """Return the data sources of a validation in which less than half of the responses could be scored. Their mean mostly
    reflects the score of failures, which may be better than any true score: it must not choose the best checkpoint."""
    by_source = _by("data_source", rows)
    return [source for source, its in by_source.items() if 2 * sum(row["error"] is not None for row in its) > len(its)]


def _by(column: str, rows: list[dict]) -> dict[str, list[dict]]:
    out: dict[str, list[dict]] = {}
    for row in rows:
        out.setdefault(row.get(column, ""), []).append(row)  # a checkpoint of an older version has no environments
    return out


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
    for of_rank, most_of_rank in of_each_rank(batch, [sums, most]):
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
    """Add a piece of whole responses, [n] each. lp, roll: the log-probs of learner and generator."""
    counts = torch.unique_consecutive(seq, return_counts=True)[1]  # [b] tokens of each response
    of_each = lambda x: torch.segment_reduce(x, "sum", lengths=counts)  # noqa: E731
    log_ratio = (lp - roll).clamp_(-20, 20)
    ratio = log_ratio.exp()
    of_response = of_each(log_ratio)
    of_sequence = of_response.clamp(-20, 20)
    sums.update(tokens=len(lp), responses=len(counts))
    sums.update(_sums(kl=-of_response, chi2_seq=(2 * of_sequence).exp()))
    sums.update(_sums(k3_kl=ratio - log_ratio - 1, chi2_token=ratio * ratio))
    sums.update(_perplexities(-of_each(lp) / counts, -of_each(roll) / counts))
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
        sums.update(_sums(rejected=rejected, touched=of_each(rejected.to(lp.dtype)) > 0))
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


KINDS = ("trained", "rejected", "unscored", "filtered", "dropped")
MOST = 16  # sources with separate metrics; if there are more, the smallest ones share theirs
OTHERS = "(others)"
# The remedy where the rollout correction rejects too much
OF_REJECTION = (
    "Widen the bounds, or bring generator and learner closer together (--rollout-dtype, a lower --staleness-threshold)"
)


@dataclass(frozen=True)
class Fates:
    """The fate of each response; the same on every learner."""

    trained: torch.Tensor  # [B] bool: a token is trained
    rejected: torch.Tensor  # [B] bool: the rollout correction left no token
    masked: torch.Tensor  # [B] bool: the policy sampled none of its tokens
    rejected_share: float  # of the tokens that the rollout correction left out
    has_signal: bool  # whether a trained token has an advantage, or a teacher

    @staticmethod
    def of(batch: Batch) -> "Fates":
        """Return the fates of a batch. A collective of the learners."""
        weight = batch.targets.is_weight
        kept = batch.trained if weight is None else batch.trained & (weight != 0)
        signals = kept if batch.targets.teacher_log_prob is not None else kept & (batch.targets.advantage != 0)
        signal = whole_batch.sum_over_ranks(batch, torch.tensor([float(signals.any())]))
        counts = torch.stack([whole_batch.by_response(batch, batch.mask), whole_batch.by_response(batch, kept)])
        before, after = whole_batch.sum_over_ranks(batch, counts)  # [B] tokens of each response
        share = 1 - float(after.sum() / before.sum()) if before.any() else 0.0
        return Fates(after > 0, (before > 0) & (after == 0), before == 0, share, has_signal=bool(signal > 0))


class SourceCounts:
    """Counts by the data sources of the training prompts."""

    def __init__(self, prompts: PromptDataset, order: PromptOrder, responses: int):
        """responses: number of responses to each prompt."""
        self.prompts, self.order, self.responses = prompts, order, responses
        sizes = prompts.source_sizes()
        largest = sorted(sizes, key=lambda source: (-sizes[source], source))
        self.shown = largest if len(largest) <= MOST else [*largest[: MOST - 1], OTHERS]

    def of_step(self, batch: Batch, fates: Fates, gone: Mapping[str, Sequence[int]] | None) -> dict[str, int]:
        """Return data/*. gone: tickets that were not trained, by reason: "filtered" or "stale"; None if they are
        unknown: the kinds that count them are then left out."""
        counts = {source: Counter() for source in self.shown}
        places = batch.group.tolist()
        of_each = (x.tolist() for x in (fates.trained, fates.rejected, fates.masked))
        for place, trained, rejected, masked in zip(places, *of_each, strict=True):
            counts[self._shown(batch.sources[place])].update(trained=trained, rejected=rejected, masked=masked)
        scored = Counter(places)
        for place, (source, size) in enumerate(zip(batch.sources, batch.sizes, strict=True)):
            counts[self._shown(source)].update(unscored=size - scored[place])
        for reason, tickets in (gone or {}).items():
            kind = "dropped" if reason == "stale" else reason
            for ticket in tickets:
                source = self.prompts.source(self.order(ticket)[1])
                counts[self._shown(source)].update({kind: self.responses})
        kinds = [*(KINDS if gone is not None else KINDS[:3])]
        kinds += ["masked"] if batch.is_masked else []
        return {f"data/{source}/{kind}": int(of[kind]) for source, of in counts.items() for kind in kinds}

    def _shown(self, source: str) -> str:
        """Return the name under which the source counts: the last one if no prompt has it, in a replay with other data."""
        return source if source in self.shown else self.shown[-1]


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

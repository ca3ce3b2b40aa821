"""Quantities of the whole batch, whichever learner holds which part of it: rewards, advantages, denominators, means.

They are summed over the learners in float64 or in integers. An advantage estimator declares the data it needs: most only need
the scores, which travel as one number per response; for the few that need every token, all tokens are gathered temporarily.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed
from torch import Tensor

import losses
from rl.algorithm.args import RolloutCorrectionArgs
from rl.learning.batch import Batch, MicroBatch, Tokens

MEANS = ("token-mean", "seq-mean-token-mean")  # aggregations whose denominators are sums over the ranks
PIECE = 1 << 17  # tokens computed at once in passes over all of them: what a processor's cache holds


def sum_over_ranks(batch: Batch, x: Tensor) -> Tensor:
    """Sum the learners' values in place. A collective of the learners that share the batch."""
    if batch.ranks:
        torch.distributed.all_reduce(x, group=batch.ranks.data_group)
    return x


def by_response(batch: Batch, x: Tensor) -> Tensor:
    """Sum x [N] over each response's tokens here: [B] float64."""
    if not len(x):
        return torch.zeros(len(batch.local_lengths), dtype=torch.float64)
    return torch.segment_reduce(x.double(), "sum", lengths=batch.local_lengths)


def token_reward(batch: Batch) -> Tensor:
    """Return [N]: each response's score on its last token, 0 elsewhere."""
    reward = torch.zeros(len(batch.token))
    ends = batch.local_lengths.cumsum(0)[batch.local_lengths > 0] - 1
    reward[ends] = batch.score[batch.local_lengths > 0]
    return reward


def mean_of_responses(x: Tensor, batch: Batch) -> float:
    """Average x [N] over each response's trained tokens, then over all responses that have any; 0 if none has. A collective."""
    (means,) = losses.sequence_means(batch.trained, batch.seq, x.double())
    own = means[losses.trained_sequences(batch.trained, batch.seq)]
    total, count = sum_over_ranks(batch, torch.tensor([float(own.sum()), len(own)], dtype=torch.float64)).tolist()
    return total / max(1.0, count)


def denominator(batch: Batch, mini: Tensor, mode: str, budget: int) -> float:
    """Return losses.denominator of a mini-batch, whose responses are `mini` [b]. A collective."""
    tokens = span(batch, mini)
    mask = batch.trained[tokens]
    seq = batch.seq[tokens]
    own = losses.denominator(mask, seq, mode, len(mini), budget)
    if not (batch.ranks and mode in MEANS):
        return own
    return max(1.0, float(sum_over_ranks(batch, torch.tensor(own if mask.any() else 0.0, dtype=torch.float64))))


def groups_of_one(batch: Batch) -> int:
    """Return the number of groups with exactly one trained response."""
    counts = torch.bincount(batch.group)
    if batch.targets.rejected is not None or batch.is_masked:
        counts = torch.bincount(batch.group[sum_over_ranks(batch, by_response(batch, batch.trained)) > 0])
    return int((counts == 1).sum())


def advantage(estimator: losses.Estimator, batch: Batch, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """Return the estimator's advantages [N]. gamma, lam: for those that take them. A collective."""
    reward = batch.targets.reward
    mask = batch.trained
    inputs = {name: value for name, value in {"gamma": gamma, "lam": lam}.items() if name in estimator.knobs}
    inputs |= {name: getattr(batch if name in losses.PER_RESPONSE else batch.targets, name) for name in estimator.inputs}
    if estimator.looks_at == "response":
        return estimator(reward, mask, batch.seq, batch.group, **inputs)
    if estimator.looks_at == "batch":
        own = {name: inputs.pop(name) for name in estimator.inputs if name not in losses.PER_RESPONSE}

        def of_whole(reward: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
            *tensors, seq = more
            return estimator(reward, mask, seq, batch.group, **dict(zip(own, tensors, strict=True)), **inputs)

        return on_whole(batch, of_whole, reward, mask, *own.values())
    # One token represents each response: it has the total reward, and is trained if any token of the response is.
    totals, trained = (sum_over_ranks(batch, by_response(batch, x)) for x in (reward, mask))
    of_response = estimator(totals, trained > 0, torch.arange(len(totals)), batch.group, **inputs).to(reward.dtype)
    advantages = losses.to_tokens(of_response, batch.seq)
    return advantages if mask.all() else torch.where(mask, advantages, 0.0)


def chosen(loss: losses.PolicyLoss, batch: Batch, minis: Sequence[Tensor], knobs: dict[str, float]) -> Tensor | None:
    """Return the tokens that the loss chooses, [N] bool. minis: the responses [b] of each
    mini-batch; knobs: the loss's numbers for it. Random choices only depend on the batch: they are the same on every rank, for
    any micro-batches, and after a resume. A collective."""
    options = dict(knobs)
    if "generator" in loss.choice_inputs:
        total = int(sum_over_ranks(batch, batch.token[batch.mask].sum()))
        options["generator"] = torch.Generator().manual_seed(total + int(batch.sampled_lengths.sum()))
    inputs = (batch.targets.old_log_prob, batch.targets.advantage, batch.trained)
    return by_mini_batch(batch, minis, partial(loss.chooses, **options), *inputs)


def correct_rollout(args: RolloutCorrectionArgs, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """Return (weight of each token, whether it is rejected), [N], by the difference between learner and generator, whose
    kernels, precision and weights differ; None if nothing is weighted or rejected. A collective."""
    weight = None
    rejected = None
    criteria = args.rejection_criteria
    inputs = (batch.targets.actor_log_prob, batch.rollout_log_prob, batch.mask)
    if args.rollout_is:
        low, high = args.weight_bounds
        normalize = args.rollout_is_batch_normalize
        weigh = partial(losses.rollout_is_weights, level=args.rollout_is, low=low, high=high, normalize=normalize)
        apply = on_whole if normalize else by_pieces
        weight = apply(batch, weigh, *inputs)
    if criteria:
        apply = on_whole if any(level == "batch" for level, *_ in criteria) else by_pieces
        rejected = batch.mask & ~apply(batch, partial(losses.rollout_rejection_mask, criteria=criteria), *inputs)
    return weight, rejected


def on_whole(batch: Batch, function: Callable, *xs: Tensor) -> Tensor:
    """Call function(each x of the whole batch, its seq), which returns a tensor of the whole batch; return the part that is
    here. This is for the few quantities that are not sums: every learner temporarily holds the whole tensors. A collective."""
    if not batch.ranks:
        return function(*xs, batch.seq)
    lengths = batch.lengths
    shift = (lengths.cumsum(0) - lengths) - batch.starts
    places = torch.arange(len(batch.seq)) + losses.to_tokens(shift, batch.seq)  # of this rank's tokens in the whole batch
    wholes = []
    for x in xs:
        number = x.to(torch.uint8) if x.dtype == torch.bool else x
        whole = sum_over_ranks(batch, number.new_zeros(int(lengths.sum())).index_copy_(0, places, number))
        wholes.append(whole.to(x.dtype))
    return function(*wholes, torch.arange(len(lengths)).repeat_interleave(lengths))[places]


def by_mini_batch(batch: Batch, minis: Sequence[Tensor], function: Callable, *xs: Tensor) -> Tensor:
    """Return the part that is here of function(each x of a mini-batch), of one mini-batch after another. minis: the responses
    [b] of each, which are consecutive. A collective."""
    sizes = [int(batch.lengths[mini].sum()) for mini in minis]

    def of_whole(*wholes: Tensor) -> Tensor:
        parts = zip(*(x.split(sizes) for x in wholes[:-1]), strict=True)
        return torch.cat([function(*of_mini) for of_mini in parts])

    return on_whole(batch, of_whole, *xs)


def by_pieces(batch: Batch, function: Callable, *xs: Tensor) -> Tensor:
    """Return function(each x that is here, its seq), computed for some responses at a time: it treats each by itself."""
    out = function(*(x[:0] for x in xs), batch.seq[:0]).new_empty(len(batch.seq))
    for piece in pieces(batch.seq):
        out[piece] = function(*(x[piece] for x in xs), batch.seq[piece] - batch.seq[piece.start])
    return out


def span(batch: Batch, responses: Tensor) -> slice:
    """Return the slice of the [N] tensors with the tokens of consecutive responses [b], such as a mini-batch's."""
    if not len(responses):
        return slice(0, 0)
    ends = torch.tensor([int(responses[0]), int(responses[-1]) + 1])
    return slice(*torch.searchsorted(batch.seq, ends).tolist())


def pieces(seq: Tensor) -> Iterator[slice]:
    """Divide seq [N], ascending, into slices of whole responses, of at most PIECE tokens unless a response has more."""
    start = 0
    while start < len(seq):
        stop = min(len(seq), start + PIECE)
        if stop < len(seq):  # start of the response that would be cut; its end, if it is the piece's first
            first = int(torch.searchsorted(seq, seq[stop]))
            stop = first if first > start else int(torch.searchsorted(seq, seq[start], right=True))
        yield slice(start, stop)
        start = stop


def forward_only(batch: Batch, micros: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
    """Return the micro-batches of each mini-batch, `forward_only` where no learner trains anything, except a mini-batch's last
    one: the optimizer needs a gradient, even of zeros, and FSDP frees what it has gathered in the backward pass. A
    collective.

    Responses whose advantages are all 0 train nothing, because their part of the loss and its gradient are 0. They only get the
    forward pass, for the metrics: a third of the arithmetic. With a group-wise estimator these are all responses of flat
    groups, whose scores are equal because the prompt is too easy or too hard: on many tasks half of a batch or more. They get
    separate micro-batches if that saves time (`pack_apart` in rl/learning/batch.py). The gradient is the same sum without
    its zeros, equal up to rounding; metrics include all tokens."""
    trains = batch.trained & (batch.targets.advantage != 0)
    trained = [[int(trains[micro.index].count_nonzero()) for micro in of_mini] for of_mini in micros]
    totals = iter(sum_over_ranks(batch, torch.tensor([n for of_mini in trained for n in of_mini[:-1]])).tolist())
    return [
        [*(dataclasses.replace(micro, forward_only=next(totals) == 0) for micro in of_mini[:-1]), *of_mini[-1:]]
        for of_mini in micros
    ]


class LossMeans:
    """Sums over micro-batches, divided at the end, so that metrics do not depend on micro-batches and ranks. The loss's terms
    are means over the updates, each aggregated as the loss is; statistics are means over the trained tokens."""

    def __init__(self, batch: Batch):
        self._batch = batch
        self._terms: dict[str, Tensor] = {}
        self._stats: dict[str, Tensor] = {}
        self._trained = torch.zeros((), dtype=torch.float64)  # tokens
        self._computed = self._forward_only = 0  # tokens with a log-prob; those of them without a backward pass
        self._first: list[tuple[Tensor, Tensor]] = []  # (index, log-probs on the device) of the first update
        self._updates: list[dict[str, float]] = []  # what each optimizer step returned

    def add(self, t: Tokens, log_prob: Tensor | None, terms: dict[str, Tensor], stats: dict[str, Tensor]) -> None:
        """Add a micro-batch's log-probs [n], None of a critic; terms, name -> its share as a scalar; stats, name -> [n]. Every
        rank adds the same names."""
        if log_prob is not None and not self._updates:
            self._first.append((t.index, log_prob.detach()))
        self._trained = self._trained + t.mask.sum()
        self._computed += len(t.index)
        self._forward_only += len(t.index) * t.forward_only
        for name, value in terms.items():
            self._terms[name] = self._terms.get(name, 0.0) + value.detach().double()
        for name, value in stats.items():
            total = torch.where(t.mask, value.detach(), 0.0).sum().double()
            self._stats[name] = self._stats.get(name, 0.0) + total

    def end_update(self, step: dict[str, float]) -> None:
        """Add what Learner.step returned."""
        self._updates.append(step)

    @property
    def first_log_prob(self) -> Tensor:
        """[N] on the CPU: the log-probs of the first update, of the policy that starts the step; NaN for all other tokens."""
        out = torch.full((len(self._batch.token),), torch.nan)
        for index, log_prob in self._first:
            out[index] = log_prob.cpu()
        return out

    def metrics(self) -> dict[str, float]:
        """Return actor/<name> -> mean, the last update's actor/lr and actor/skipped_steps, and perf/forward_only, the part of
        the tokens without a backward pass. A collective."""
        own = torch.stack([self._trained, *self._terms.values(), *self._stats.values()]).cpu()  # the only wait for the device
        own = torch.cat([own.new_tensor([self._computed, self._forward_only]), own])
        computed, forward_only, trained, *sums = sum_over_ranks(self._batch, own).tolist()
        updates = len(self._updates)
        over = [updates] * len(self._terms) + [max(1.0, trained)] * len(self._stats)
        names = [*self._terms, *self._stats]
        out = {f"actor/{name}": total / n for name, total, n in zip(names, sums, over, strict=True)}
        norms = [step["actor/grad_norm"] for step in self._updates]
        out |= {"actor/grad_norm": sum(norms) / updates, "perf/forward_only": forward_only / max(1.0, computed)}
        return self._updates[-1] | out

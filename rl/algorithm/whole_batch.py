"""Quantities of the whole batch, whichever learner holds which part of it: advantages, denominators, means.

They are summed over the learners in float64 or in integers. An advantage estimator declares the data it needs: most only need
the scores, which travel as one number per response; for the few that need every token, all tokens are gathered temporarily.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import losses
from rl.algorithm.args import RolloutCorrectionArgs
from rl.learning.batch import Batch, pieces

MEANS = ("token-mean", "seq-mean-token-mean")  # aggregations whose denominators are sums over the ranks


def mean_of_responses(x: Tensor, batch: Batch) -> float:
    """Average x [N] over each response's trained tokens, then over all responses that have any; 0 if none has. A collective."""
    (means,) = losses.sequence_means(batch.trained, batch.seq, x.double())
    own = means[losses.trained_sequences(batch.trained, batch.seq)]
    total, count = batch.sum_over_ranks(torch.tensor([float(own.sum()), len(own)], dtype=torch.float64)).tolist()
    return total / max(1.0, count)


def denominator(batch: Batch, mini: Tensor, mode: str, budget: int) -> float:
    """Return losses.denominator of a mini-batch, whose responses are `mini` [b]. A collective."""
    tokens = batch.span(mini)
    mask = batch.trained[tokens]
    seq = batch.seq[tokens]
    own = losses.denominator(mask, seq, mode, len(mini), budget)
    if not (batch.ranks and mode in MEANS):
        return own
    return max(1.0, float(batch.sum_over_ranks(torch.tensor(own if mask.any() else 0.0, dtype=torch.float64))))


def groups_of_one(batch: Batch) -> int:
    """Return the number of groups with exactly one trained response."""
    counts = torch.bincount(batch.group)
    if batch.targets.rejected is not None or batch.is_masked:
        counts = torch.bincount(batch.group[batch.sum_over_ranks(batch.by_response(batch.trained)) > 0])
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
    totals, trained = (batch.sum_over_ranks(batch.by_response(x)) for x in (reward, mask))
    of_response = estimator(totals, trained > 0, torch.arange(len(totals)), batch.group, **inputs).to(reward.dtype)
    advantages = losses.to_tokens(of_response, batch.seq)
    return advantages if mask.all() else torch.where(mask, advantages, 0.0)


def chosen(loss: losses.PolicyLoss, batch: Batch, minis: Sequence[Tensor], knobs: dict[str, float]) -> Tensor | None:
    """Return the tokens that the loss chooses, [N] bool. minis: the responses [b] of each
    mini-batch; knobs: the loss's numbers for it. Random choices only depend on the batch: they are the same on every rank, for
    any micro-batches, and after a resume. A collective."""
    options = dict(knobs)
    if "generator" in loss.choice_inputs:
        total = int(batch.sum_over_ranks(batch.token[batch.mask].sum()))
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
        whole = batch.sum_over_ranks(number.new_zeros(int(lengths.sum())).index_copy_(0, places, number))
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

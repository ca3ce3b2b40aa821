"""What concerns the whole batch, whichever learner holds which part of it: advantages, denominators, means.

It is summed over the learners in float64 or in whole numbers. An estimator of advantages declares what it looks at: most look
at the scores alone, which travel as one number a response; the few that look at every token have them gathered while they work.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import losses

if TYPE_CHECKING:
    from rl.learning.batch import Batch


ADDITIVE = ("token-mean", "seq-mean-token-mean")  # aggregations whose denominators count what each rank can count by itself


# ------------------------------------------------------------------------------------------------------- of the whole batch


def mean_of_responses(x: Tensor, batch: "Batch") -> float:
    """Mean over the whole batch's responses of x [N], of each its mean over its trained tokens; 0 if none has any."""
    (means,) = losses.sequence_means(batch.trained, batch.seq, x.double())
    own = means[losses.trained_sequences(batch.trained, batch.seq)]
    total, count = batch.sum_over_ranks(torch.tensor([float(own.sum()), len(own)], dtype=torch.float64)).tolist()
    return total / max(1.0, count)


def denominator(batch: "Batch", mini: Tensor, mode: str, budget: int) -> float:
    """losses.denominator of a mini-batch, whose responses are `mini` [b]."""
    tokens = batch.span(mini)
    mask, seq = batch.trained[tokens], batch.seq[tokens]
    own = losses.denominator(mask, seq, mode, len(mini), budget)
    if not (batch.ranks and mode in ADDITIVE):
        return own
    return max(1.0, float(batch.sum_over_ranks(torch.tensor(own if mask.any() else 0.0, dtype=torch.float64))))


def groups_of_one(batch: "Batch") -> int:
    """The groups of which one response alone is trained: there is one, or the others could not be scored, were rejected, or are
    masked as a whole."""
    counts = torch.bincount(batch.group)
    if batch.targets.rejected is not None or batch.is_masked:
        counts = torch.bincount(batch.group[batch.sum_over_ranks(batch.by_response(batch.trained)) > 0])
    return int((counts == 1).sum())


def advantage(estimator: Callable, batch: "Batch", **inputs) -> Tensor:
    """The estimator's advantages [N]. inputs: its keywords; tensors among them are [N], but for losses.PER_RESPONSE, [B]."""
    reward, mask = batch.targets.reward, batch.trained
    if estimator.looks_at == "response":
        return estimator(reward, mask, batch.seq, batch.group, **inputs)
    if estimator.looks_at == "batch":
        own = {name: inputs.pop(name) for name in estimator.inputs if name not in losses.PER_RESPONSE}

        def of_whole(reward: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
            *tensors, seq = more
            return estimator(reward, mask, seq, batch.group, **dict(zip(own, tensors, strict=True)), **inputs)

        return on_whole(batch, of_whole, reward, mask, *own.values())
    # One token stands for each response: its total, trained if any of its tokens is.
    totals, trained = (batch.sum_over_ranks(batch.by_response(x)) for x in (reward, mask))
    of_response = estimator(totals, trained > 0, torch.arange(len(totals)), batch.group, **inputs).to(reward.dtype)
    advantages = losses.to_tokens(of_response, batch.seq)
    return advantages if mask.all() else torch.where(mask, advantages, 0.0)


def on_whole(batch: "Batch", function: Callable, *xs: Tensor) -> Tensor:
    """function(each x of the whole batch, its seq) -> a tensor of the whole batch; this returns the part that is here. For the
    few things that cannot be had from sums: every learner holds them whole meanwhile."""
    if not batch.ranks:
        return function(*xs, batch.seq)
    lengths = batch.lengths
    shift = (lengths.cumsum(0) - lengths) - batch.starts
    places = torch.arange(len(batch.seq)) + losses.to_tokens(shift, batch.seq)  # of this rank's tokens in the whole
    wholes = []
    for x in xs:
        number = x.to(torch.uint8) if x.dtype == torch.bool else x
        whole = batch.sum_over_ranks(number.new_zeros(int(lengths.sum())).index_copy_(0, places, number))
        wholes.append(whole.to(x.dtype))
    return function(*wholes, torch.arange(len(lengths)).repeat_interleave(lengths))[places]

"""Responses whose advantages are all 0 train nothing: their part of the loss is 0, and so is its gradient. They pass forward
alone, for the metrics, and are spared two thirds of the arithmetic.

With a group-wise estimator these are all responses of a flat group, whose scores are equal: of a prompt that is too easy or too
hard, half of a batch and more on many tasks. Scores are known before a batch is divided, and flat groups have micro-batches of
their own where that pays (`pack_apart` in rl/learning/division.py). The gradient is the same sum without its zeros, equal to
rounding; metrics are of all tokens, as ever.

That nothing is left out is looked at twice: a micro-batch passes forward alone if no learner has an advantage in it, and the
loss's gradient is still computed up to its log-probs. If that is not 0, as in a script of one's own that trains all responses,
the run ends with a message.
"""

from collections.abc import Sequence

import torch

from rl.errors import UserError
from rl.learning.batch import Batch, MicroBatch
from rl.ranks.dist import all_reduce_sum


def mark(args, batch: Batch, micros: Sequence[Sequence[MicroBatch]]) -> None:
    """args: AlgorithmArgs, which imports losses: a replay says which. micros: of each mini-batch. Those in which nothing trains
    become `forward_only`, but for a mini-batch's last: the optimizer wants a gradient, be it zeros, and with it FSDP lets go of
    what it has gathered. A collective of the learners."""
    if not args.skips_backward:
        return
    in_front = [micro for of_mini in micros for micro in of_mini[:-1]]
    trains = batch.trained & (batch.targets.advantage != 0)
    trained = [int(trains[micro.index].count_nonzero()) for micro in in_front]
    for micro, tokens in zip(in_front, all_reduce_sum(torch.tensor(trained)).tolist(), strict=True):
        micro.forward_only = tokens == 0


def check_no_gradient(*xs: torch.Tensor) -> None:
    """Has what a loss is computed of, log-probs and entropy [n], raise a UserError if its gradient there is not 0."""
    for x in xs:
        x.requires_grad_().register_hook(_refuse)


def _refuse(grad: torch.Tensor) -> None:
    if grad.nan_to_num(nan=0.0).any():  # NaN comes of log-probs that are, which a report tells
        raise UserError(
            "the loss trains responses whose advantages are all 0, which pass forward alone. Let the script train them: "
            "--backward-without-advantage."
        )

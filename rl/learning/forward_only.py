"""Responses whose advantages are all 0 train nothing: their loss and its gradient are 0. They only get a forward pass, for the
metrics, which saves two thirds of the arithmetic.

With a group-wise estimator these are the responses of flat groups, whose scores are all equal because the prompt is too easy or
too hard: on many tasks half of a batch and more. Scores are known before a batch is divided, and flat groups get micro-batches
of their own if that pays (`pack_apart` in rl/learning/division.py). The gradient is the same sum without its zeros, equal up to
rounding; metrics include all tokens.

Two checks make sure that nothing is left out: a micro-batch skips its backward pass only if no learner has an advantage in it,
and the loss's gradient is still computed up to its log-probs. If that is not 0, as in a custom script that trains all,
the run ends with a message.
"""

from collections.abc import Sequence

import torch

from rl.errors import UserError
from rl.learning.batch import Batch, MicroBatch
from rl.ranks.dist import all_reduce_sum


def mark(args, batch: Batch, micros: Sequence[Sequence[MicroBatch]]) -> None:
    """Makes micro-batches in which nothing trains `forward_only`, except the last of a mini-batch: the optimizer needs a
    gradient, even of zeros, and FSDP frees its gathered parameters with it. args: AlgorithmArgs; micros: of each mini-batch. A
    collective of the learners."""
    if not args.skips_backward:
        return
    in_front = [micro for of_mini in micros for micro in of_mini[:-1]]
    trains = batch.trained & (batch.targets.advantage != 0)
    trained = [int(trains[micro.index].count_nonzero()) for micro in in_front]
    for micro, tokens in zip(in_front, all_reduce_sum(torch.tensor(trained)).tolist(), strict=True):
        micro.forward_only = tokens == 0


def check_no_gradient(*xs: torch.Tensor) -> None:
    """Has a loss's inputs, log-probs and entropy [n], raise a UserError in the backward pass if their gradient is not 0."""
    for x in xs:
        x.requires_grad_().register_hook(_refuse)


def _refuse(grad: torch.Tensor) -> None:
    if grad.nan_to_num(nan=0.0).any():  # NaN comes from log-probs that are NaN, which are reported elsewhere
        raise UserError(
            "the loss trains responses whose advantages are all 0, but they have no backward pass. Add "
            "--backward-without-advantage, which trains them."
        )

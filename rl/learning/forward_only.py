"""Skips the backward pass of responses whose advantages are all 0: they train nothing, because their part of the loss and its
gradient are 0. The forward pass is kept for the metrics; two thirds of the arithmetic is saved.

With a group-wise estimator these are all responses of flat groups, whose scores are equal because the prompt is too easy or too
hard: on many tasks half of a batch or more. They get separate micro-batches if that saves time (`pack_apart` in
rl/learning/division.py). The gradient is the same sum without its zeros, equal up to rounding; metrics include all tokens.

The loss's gradient is still computed up to the log-probs. If it is not 0 there, as in a custom script that trains all
responses, the run ends with a message.
"""

import dataclasses

import torch

from rl.errors import UserError
from rl.learning.batch import Batch, MicroBatch
from rl.ranks.dist import all_reduce_sum


def forward_only(batch: Batch, micros: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
    """Return the micro-batches of each mini-batch, `forward_only` where no learner trains anything, except a mini-batch's last
    one: the optimizer needs a gradient, even of zeros, and FSDP frees what it has gathered in the backward pass. A
    collective."""
    trains = batch.trained & (batch.targets.advantage != 0)
    trained = [[int(trains[micro.index].count_nonzero()) for micro in of_mini] for of_mini in micros]
    totals = iter(all_reduce_sum(torch.tensor([n for of_mini in trained for n in of_mini[:-1]])).tolist())
    return [
        [*(dataclasses.replace(micro, forward_only=next(totals) == 0) for micro in of_mini[:-1]), *of_mini[-1:]]
        for of_mini in micros
    ]


def check_no_gradient(*xs: torch.Tensor) -> None:
    """Let log-probs and entropy [n] raise a UserError in the backward pass if the loss's gradient there is not 0."""
    for x in xs:
        x.requires_grad_().register_hook(_refuse)


def _refuse(grad: torch.Tensor) -> None:
    if grad.nan_to_num(nan=0.0).any():  # NaN comes from log-probs that are NaN, which are reported elsewhere
        raise UserError(
            "the loss trains responses whose advantages are all 0, but they have no backward pass. Take the line "
            "`micros = forward_only(batch, micros)` out of `learn`."
        )

"""The tokens that clip_cov and kl_cov choose in a mini-batch."""

from functools import partial

import torch

import losses
from rl.algorithm import whole_batch
from rl.algorithm.args import AlgorithmArgs
from rl.learning.batch import Batch


def choose_tokens(args: AlgorithmArgs, batch: Batch, minis: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the tokens that the loss chooses, [N] bool; None for a loss that chooses none. minis: the responses [b] of each
    mini-batch. Random choices only depend on the batch, so they are the same on every rank and after a resume."""
    loss = losses.POLICY_LOSSES[args.loss_mode]
    if loss.chooses is None:
        return None
    options = dict(args.choice_knobs)
    if "generator" in loss.choice_inputs:
        total = int(batch.sum_over_ranks(batch.token[batch.mask].sum()))
        options["generator"] = torch.Generator().manual_seed(total + int(batch.sampled_lengths.sum()))

    inputs = (batch.targets.old_log_prob, batch.targets.advantage, batch.trained)
    return whole_batch.by_mini_batch(batch, minis, partial(loss.chooses, **options), *inputs)

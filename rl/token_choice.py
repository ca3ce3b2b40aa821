"""The tokens that clip_cov and kl_cov single out of a mini-batch."""

import torch

import losses
from rl.algorithm_args import AlgorithmArgs
from rl.batch import Batch


def choose_tokens(args: AlgorithmArgs, batch: Batch, minis: list[torch.Tensor]) -> None:
    """Sets the batch's `chosen`, for the losses that single out tokens. minis: the responses [b] of each mini-batch. What is
    drawn depends on the batch alone: it is the same on every rank, whatever the micro-batches, and after a resume."""
    loss = losses.POLICY_LOSSES[args.loss_mode]
    if loss.chooses is None:
        return
    options = dict(args.choice_knobs)
    if "generator" in loss.choice_inputs:
        options["generator"] = torch.Generator().manual_seed(int(batch.token.sum()) + len(batch.token))
    batch.chosen = torch.zeros_like(batch.mask)
    for mini in minis:
        tokens = batch.span(mini)
        inputs = (x[tokens] for x in (batch.old_log_prob, batch.advantage, batch.mask))
        batch.chosen[tokens] = loss.chooses(*inputs, **options)

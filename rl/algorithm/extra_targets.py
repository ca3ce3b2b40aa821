"""Targets that plain GRPO does without: what a teacher, a critic, the policy's spread, clip_cov and kl_cov add to a batch.

Left out: the terms of the loss that use them (losses.py).
"""

from functools import partial

import torch
from torch import Tensor

import losses
from rl.algorithm import whole_batch
from rl.algorithm.args import AlgorithmArgs
from rl.algorithm.spread import spread_of
from rl.learning.batch import Batch, MicroBatch
from rl.learning.learner import Learner
from rl.ranks.timers import Timers


def extra_targets(
    args: AlgorithmArgs, learner: Learner, batch: Batch, minis: list[Tensor], micros: list[list[MicroBatch]], timer: Timers
) -> dict[str, Tensor | None]:
    """Return fields of the batch's Targets, [N] each, from separate forward passes; none for plain GRPO.
    minis: the responses [b] of each mini-batch; micros: its micro-batches. A collective of the learners."""
    found: dict[str, Tensor | None] = {}
    if args.needs_spread:
        with timer("old_log_prob"):
            found["energy"], found["high_entropy"] = spread_of(args, learner, batch, minis, micros)
    if args.teacher:
        with timer("teacher"):
            found["teacher_log_prob"] = learner.log_probs_of("teacher", batch, micros)
    if args.needs_critic:
        with timer("values"):
            found["value"] = learner.critic.values_of(batch, micros)
    return found


def choose_tokens(args: AlgorithmArgs, batch: Batch, minis: list[Tensor]) -> Tensor | None:
    """Return the tokens that the loss chooses, [N] bool; None for a loss that chooses none. minis: the responses [b] of each
    mini-batch. Random choices only depend on the batch: they are the same on every rank, for any micro-batches, and after a
    resume."""
    loss = losses.POLICY_LOSSES[args.loss_mode]
    if loss.chooses is None:
        return None
    options = dict(args.choice_knobs)
    if "generator" in loss.choice_inputs:
        total = int(batch.sum_over_ranks(batch.token[batch.mask].sum()))
        options["generator"] = torch.Generator().manual_seed(total + int(batch.sampled_lengths.sum()))

    inputs = (batch.targets.old_log_prob, batch.targets.advantage, batch.trained)
    return whole_batch.by_mini_batch(batch, minis, partial(loss.chooses, **options), *inputs)

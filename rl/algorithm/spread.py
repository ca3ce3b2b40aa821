"""Decisions from the policy's distribution at each token, before the update: the tokens to which the policy loss is restricted
(`--top-entropy-quantile`), and their weights in `--adv-estimator optimal_token_baseline`. They take a separate forward pass.
Also the losses that leave tokens out, for this and for `--off-policy-mask-threshold`."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

import losses
from rl.algorithm import whole_batch
from rl.learning.batch import Batch, MicroBatch


def spread_of(args, learner, batch: Batch, minis: list[Tensor], micros: list[list[MicroBatch]]) -> tuple[Tensor, Tensor | None]:
    """Return (energy [N] for losses.optimal_token_baseline, bool [N], the tokens with large entropy in each mini-batch, or None
    without --top-entropy-quantile). args: AlgorithmArgs; minis: the responses [b] of each mini-batch."""
    energy, entropy = learner.spread_of(batch, micros)
    if args.top_entropy_quantile == 1:
        return energy, None

    choose = functools.partial(losses.high_entropy_tokens, quantile=args.top_entropy_quantile)
    return energy, whole_batch.by_mini_batch(batch, minis, choose, entropy, batch.mask)


def where_entropy_is_high(loss: losses.PolicyLoss) -> losses.PolicyLoss:
    """Restrict the loss to the tokens of high_entropy [N], a further input; denominators still count all tokens."""
    return _leaving_out(loss, "high_entropy", lambda high_entropy, *_: ~high_entropy)


def centered(loss: losses.PolicyLoss) -> losses.PolicyLoss:
    """Add `losses.score_centering` to the loss, which has no ratio (--score-centering). The result also takes expected_log_prob
    [N], and is correct for tokens of other weights without importance weights."""

    @functools.wraps(loss.function)
    def with_baseline(
        log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, seq: Tensor, expected_log_prob: Tensor, **more
    ) -> losses.Loss:
        token_loss, stats = loss(log_prob, old_log_prob, advantage, mask, seq, **more)
        return token_loss + losses.score_centering(expected_log_prob, advantage, mask), stats

    return dataclasses.replace(loss, function=with_baseline, inputs=(*loss.inputs, "expected_log_prob"), has_ratio=True)


def masked(loss: losses.PolicyLoss, threshold: float) -> losses.PolicyLoss:
    """Remove `losses.off_policy_tokens`, which also needs rollout_log_prob [N]; the statistic off_policy_masked counts them."""

    def off_policy(rollout_log_prob: Tensor, log_prob: Tensor, advantage: Tensor, mask: Tensor, seq: Tensor) -> Tensor:
        return losses.off_policy_tokens(log_prob, rollout_log_prob, advantage, mask, seq, threshold=threshold)

    return _leaving_out(loss, "rollout_log_prob", off_policy, counts="off_policy_masked")


def _leaving_out(
    loss: losses.PolicyLoss, name: str, which: Callable[..., Tensor], counts: str | None = None
) -> losses.PolicyLoss:
    """Return the loss with 0, and no gradient, on the tokens that which(x, log_prob, advantage, mask, seq) chooses, [N] bool; x
    [N] is the input `name`. counts: name of a statistic of these tokens."""

    @functools.wraps(loss.function)
    def without(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, seq: Tensor, **inputs) -> losses.Loss:
        x = inputs[name] if name in loss.inputs else inputs.pop(name)
        out = which(x, log_prob, advantage, mask, seq)
        token_loss, stats = loss(log_prob, old_log_prob, advantage, mask, seq, **inputs)
        return torch.where(out, 0.0, token_loss), stats | ({counts: out} if counts else {})

    return dataclasses.replace(loss, function=without, inputs=tuple(dict.fromkeys((*loss.inputs, name))))

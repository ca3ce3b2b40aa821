"""`--off-policy-mask-threshold`: any policy loss without bad responses that have become less likely since they were sampled."""

import dataclasses
import functools

import torch
from torch import Tensor

import losses


def masked(loss: losses.PolicyLoss, threshold: float) -> losses.PolicyLoss:
    """The loss with 0, and no gradient, on `losses.off_policy_tokens`, which its statistic off_policy_masked counts. It takes
    rollout_log_prob [N], too."""

    @functools.wraps(loss.function)
    def without(
        log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, seq: Tensor, rollout_log_prob: Tensor, **more
    ) -> losses.Loss:
        if "rollout_log_prob" in loss.inputs:
            more["rollout_log_prob"] = rollout_log_prob
        out = losses.off_policy_tokens(log_prob, rollout_log_prob, advantage, mask, seq, threshold=threshold)
        token_loss, stats = loss(log_prob, old_log_prob, advantage, mask, seq, **more)
        return torch.where(out, 0.0, token_loss), stats | {"off_policy_masked": out}

    inputs = tuple(dict.fromkeys((*loss.inputs, "rollout_log_prob")))
    return dataclasses.replace(loss, function=without, inputs=inputs)

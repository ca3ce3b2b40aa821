"""Advantages, policy losses, KL estimators and aggregations: pure functions of tensors, importable alone (torch only).

Layout. Everything per token is packed, [N]: the response tokens of the batch end to end. Beside it stand `mask` [N] (bool,
True on trained tokens) and `seq` [N] (long, which response a token belongs to, 0..B-1); per response there is `group` [B]
(long, any ids: responses of one prompt share one, wherever they lie). Packed, because then no padding exists that could leak
into a mean, and a micro-batch is an index into the same tensors. A response always lies whole in one micro-batch.

Denominators are arguments, computed once over the GLOBAL mini-batch (all ranks, all micro-batches), so that the sum of the
micro-batches' losses does not depend on how the batch was cut.

Policy losses return the loss per token and statistics per token; a statistic's masked mean over the global batch is the
metric. At the bottom plain dictionaries map the scripts' flags to the functions.
"""

import torch

# ------------------------------------------------------------------------------------------------- sums by response


def sequence_sum(x: torch.Tensor, seq: torch.Tensor, num_seqs: int) -> torch.Tensor:
    """Sum of x [N] over each response's tokens -> [num_seqs]; 0 for a response without tokens."""
    return torch.zeros(num_seqs, dtype=x.dtype, device=x.device).index_add(0, seq, x)


# ------------------------------------------------------------------------------------------------------ aggregation


def denominator(mask: torch.Tensor, seq: torch.Tensor, mode: str, num_seqs: int, budget: int = 1) -> float:
    """What `aggregate` divides by; mask, seq [N] and num_seqs are those of the GLOBAL mini-batch.

    token-mean: trained tokens. token-sum: 1. seq-mean-token-sum: responses. seq-mean-token-sum-norm: responses times
    `budget` tokens (the response budget; Dr.GRPO, arXiv 2503.20783). seq-mean-token-mean: responses with a trained token.
    At least 1, so that an empty batch gives a loss of 0.
    """
    units = {
        "token-mean": lambda: int(mask.sum()),
        "token-sum": lambda: 1,
        "seq-mean-token-sum": lambda: num_seqs,
        "seq-mean-token-sum-norm": lambda: num_seqs * budget,
        "seq-mean-token-mean": lambda: len(torch.unique(seq[mask])),
    }
    return float(max(1, units[mode]()))


def aggregate(loss: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, mode: str, denominator: float) -> torch.Tensor:
    """loss, mask, seq [N] of a micro-batch -> its share (scalar) of the global loss; `denominator` from the function above.

    The sum over trained tokens, each weighted 1, or 1 / (trained tokens of its response) in seq-mean-token-mean.
    """
    loss = torch.where(mask, loss, 0.0)
    if mode == "seq-mean-token-mean" and len(seq):
        lengths = sequence_sum(mask.to(loss.dtype), seq, int(seq.max()) + 1)  # [B]
        loss = loss / lengths.clamp(min=1)[seq]
    return loss.sum() / denominator


# ------------------------------------------------------------------------------------------------------- advantages
# f(reward [N], mask [N], seq [N], group [B]) -> advantage [N], 0 where the mask is. `reward` is per token (the score on the
# last token, KL penalties on each). A response's s is the sum over ALL its tokens, so a score on a masked token counts.


def grpo(
    reward: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, group: torch.Tensor, *, eps: float = 1e-6
) -> torch.Tensor:
    """A = (s - mean_g) / (std_g + eps), std with Bessel's correction; in a group of one mean 0 and std 1: A = s / (1 + eps).

    Group Relative Policy Optimization, arXiv 2402.03300. Equal scores in a group give 0.
    """
    score = sequence_sum(reward, seq, len(group))
    mean, size, index = _group_mean(score, group)
    centered = score - mean[index]
    squares = torch.zeros_like(mean).index_add(0, index, centered**2)
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    alone = size[index] == 1
    advantage = torch.where(alone, score / (1 + eps), centered / (std[index] + eps))
    return _to_tokens(advantage, mask, seq)


def dr_grpo(reward: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """A = s - mean_g: GRPO without the division by the standard deviation, which favours easy and hard prompts.

    Dr.GRPO, arXiv 2503.20783; its aggregation is seq-mean-token-sum-norm. A group of one gives 0.
    """
    score = sequence_sum(reward, seq, len(group))
    mean, _, index = _group_mean(score, group)
    return _to_tokens(score - mean[index], mask, seq)


def rloo(reward: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """A = n / (n - 1) * (s - mean_g), which is s minus the mean of the other n - 1; a group of one gives 0.

    REINFORCE leave-one-out, arXiv 2402.14740.
    """
    score = sequence_sum(reward, seq, len(group))
    mean, size, index = _group_mean(score, group)
    factor = size / (size - 1).clamp(min=1)
    return _to_tokens(factor[index] * (score - mean[index]), mask, seq)


def _group_mean(score: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """score, group [B] -> (mean [G], size [G], each response's group as an index [B])."""
    ids, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    mean = torch.zeros(len(ids), dtype=score.dtype, device=score.device).index_add(0, index, score) / size
    return mean, size, index


def _to_tokens(advantage: torch.Tensor, mask: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
    """[B] -> [N], 0 where the mask is."""
    return torch.where(mask, advantage[seq], 0.0)


# ---------------------------------------------------------------------------------------------------- policy losses
# f(log_prob, old_log_prob, advantage, mask, seq, *, clip_low, clip_high, clip_c) -> (loss [N], {statistic: [N]}).
# All tensors [N]. Only log_prob carries a gradient. Clips of None take the paper's.


def log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """d = log_prob - old_log_prob, [N]; 0 where the mask is, so that nothing non-finite there reaches loss or gradient."""
    return torch.where(mask, log_prob, 0.0) - torch.where(mask, old_log_prob, 0.0)


def ppo_clip(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    seq: torch.Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    clip_c: float = 3.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(clamp(d, +-20)); where A < 0 at most -A c (dual clip).

    PPO (arXiv 1707.06347; low = high = 0.2, the default here); high = 0.28 is DAPO's clip-higher (2503.14476); dual clip
    2001.04451. Statistics: pg_clipfrac, tokens whose gradient the clip removed; pg_clipfrac_lower, those that the dual clip
    did; ppo_kl = -d.
    """
    low, high = 0.2 if clip_low is None else clip_low, 0.2 if clip_high is None else clip_high
    d = log_ratio(log_prob, old_log_prob, mask)
    ratio = d.clamp(-20, 20).exp()
    plain = -advantage * ratio
    clipped = torch.maximum(plain, -advantage * ratio.clamp(1 - low, 1 + high))
    bound = -advantage * clip_c
    loss = torch.where(advantage < 0, torch.minimum(clipped, bound), clipped)
    stats = {
        "pg_clipfrac": (clipped > plain).to(d.dtype),
        "pg_clipfrac_lower": ((clipped > bound) & (advantage < 0)).to(d.dtype),
        "ppo_kl": -d.detach(),
    }
    return loss, stats


# --------------------------------------------------------------------------------------------- KL to the reference
# Estimators of KL(policy || reference) on tokens the policy sampled; f(k1 [N]) with k1 = log_prob - ref_log_prob.


def k1(x: torch.Tensor) -> torch.Tensor:
    """x: unbiased in value, high variance, negative at times; as a loss its gradient is 0 in expectation."""
    return x


def k2(x: torch.Tensor) -> torch.Tensor:
    """x^2 / 2: biased in value, but as a loss its gradient is that of the KL, unbiased."""
    return x**2 / 2


def k3(x: torch.Tensor) -> torch.Tensor:
    """clamp(exp(-x) - 1 + x, +-10), x clamped to +-20: unbiased in value, never negative ("low_var_kl", GRPO); as a loss its
    gradient is that of the reverse divergence, KL(reference || policy)."""
    x = x.clamp(-20, 20)
    return (torch.exp(-x) - 1 + x).clamp(-10, 10)


def kl_penalty(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, mask: torch.Tensor, kind: str) -> torch.Tensor:
    """The estimator `kind` per token, [N]; 0 where the mask is. See Schulman, "Approximating KL Divergence" (2020)."""
    return KL_ESTIMATORS[kind](log_ratio(log_prob, ref_log_prob, mask))


# ----------------------------------------------------------------------------------------------- the flags' words

ADVANTAGES = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
POLICY_LOSSES = {"ppo_clip": ppo_clip}
KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

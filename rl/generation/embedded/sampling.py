"""The embedded engine's sampling: temperature, top k and nucleus, one random number a token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rl.model.head import support


@dataclass
class SlotSettings:
    """The sampling settings of the first A slots, one entry a slot."""

    temperature: torch.Tensor  # [A] float
    top_k: torch.Tensor  # [A] long
    top_p: torch.Tensor  # [A] float
    truncates: bool  # whether any slot needs the sort
    support: int = 0  # most tokens of a slot's support that are recorded; 0 where no slot needs them
    support_log_probs: bool = False  # with their log-probs


def sample(
    logits: torch.Tensor, uniform: torch.Tensor, settings: SlotSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Inverse-CDF sampling: one uniform number a token, so a request's randomness is a stream of its own.

    logits [A, V] in any precision, uniform [A] in [0, 1) -> (token [A], log-prob of it under the sampled distribution [A],
    the record of the tokens that could be sampled or None).
    """
    greedy = settings.temperature == 0
    logits = logits.float() / torch.where(greedy, 1.0, settings.temperature)[:, None]
    if settings.truncates:
        logits = _truncate(logits, settings.top_k, settings.top_p)
    log_probs = F.log_softmax(logits, dim=-1)
    cdf = log_probs.exp().cumsum(-1)
    last = cdf[:, -1:].contiguous()
    # right=True never picks a token of probability 0; a target rounded up to the whole sum takes the token that reaches it.
    token = torch.searchsorted(cdf, uniform[:, None] * last, right=True)
    token = torch.minimum(token, torch.searchsorted(cdf, last)).squeeze(1)
    token = torch.where(greedy, log_probs.argmax(-1), token)
    found = support.of_logits(logits, settings.support, settings.support_log_probs) if settings.support else None
    return token, log_probs.gather(1, token[:, None]).squeeze(1), found


def _truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Sets to -inf what lies outside the top k (k <= 0: all) and the nucleus p. [A, V], [A], [A] -> [A, V]."""
    values, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    drop = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probs = values.masked_fill(drop, -torch.inf).softmax(-1)
    drop |= probs.cumsum(-1) - probs >= top_p[:, None]  # the token that crosses p stays
    drop[:, 0] = False
    return logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)

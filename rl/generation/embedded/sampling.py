"""The embedded engine's sampling: temperature, top k and nucleus, with one random number per token."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rl.generation.engine import SamplingParams
from rl.model import sampling_mask


def sample(
    logits: torch.Tensor, uniform: torch.Tensor, settings: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sample by the inverse CDF: one uniform number per token, so each request has a separate stream of random numbers.

    logits [A, V] in any precision, uniform [A] in [0, 1), settings of each row -> (token [A], log-prob of it under the sampled
    distribution [A], the record of the tokens that could be sampled or None).
    """
    temperature = torch.tensor([s.temperature for s in settings]).to(logits.device)
    greedy = temperature == 0
    logits = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    if any(s.truncates for s in settings):
        top_k = torch.tensor([s.top_k for s in settings]).to(logits.device)
        top_p = torch.tensor([s.top_p for s in settings]).to(logits.device)
        logits = _truncate(logits, top_k, top_p)
    log_probs = F.log_softmax(logits, dim=-1)
    cdf = log_probs.exp().cumsum(-1)
    last = cdf[:, -1:].contiguous()
    # right=True never picks a token of probability 0; a target rounded up to the whole sum takes the token that reaches it.
    token = torch.searchsorted(cdf, uniform[:, None] * last, right=True)
    token = torch.minimum(token, torch.searchsorted(cdf, last)).squeeze(1)
    token = torch.where(greedy, log_probs.argmax(-1), token)
    most = max(s.support for s in settings)
    found = sampling_mask.of_logits(logits, most) if most else None
    return token, log_probs.gather(1, token[:, None]).squeeze(1), found


def _truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set logits outside the top k (k <= 0: all) and the nucleus p to -inf. [A, V], [A], [A] -> [A, V]."""
    values, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    drop = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probs = values.masked_fill(drop, -torch.inf).softmax(-1)
    drop |= probs.cumsum(-1) - probs >= top_p[:, None]  # the token that crosses p stays
    drop[:, 0] = False
    return logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)

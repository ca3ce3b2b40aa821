"""`--keep-sampling-mask`: top-k and nucleus sampling without bias.

Top-k and top-p sample from the policy restricted to a set S of tokens, the sampling mask. The engine records S, and the learner
computes all log-probs (of the policy, the reference and a teacher) over the same S:

    log pi(a | S) = log pi(a) - log sum over b in S of pi(b)

So the ratio is 1 under the weights that sampled, and with S held fixed the gradient is that of the policy that sampled. Over
the whole vocabulary it would not be: each token would also be trained to draw probability into S, even if the mass of S were in
the ratio. DeepSeek-V3.2 keeps the mask in the same way (arXiv 2512.02556, "Keep Sampling Mask"). Entropies are still computed
over the whole vocabulary.

The engine records S as K token numbers for each sampled token.
"""

import numpy as np
import torch
from torch import Tensor

NOTHING = -1  # behind the tokens of S; in all places if nothing is recorded: then S is the vocabulary
TIES = 8  # vLLM keeps all tokens that are as likely as the k-th; up to this many of them are also recorded


def most_tokens(sampling) -> int:
    """The most tokens of S in a record: 0 without the flag. sampling: SamplingArgs."""
    return sampling.top_k + TIES if sampling.keep_sampling_mask else 0


def of_logits(logits: Tensor, most: int) -> Tensor:
    """logits [A, V], -inf outside of S -> S [A, most] int32, the likeliest token first."""
    values, tokens = logits.topk(min(most, logits.shape[1]))
    beyond = (0, most - values.shape[1])
    return torch.nn.functional.pad(tokens.masked_fill(values == -torch.inf, NOTHING).int(), beyond, value=NOTHING)


def nothing(tokens: int, columns: int) -> np.ndarray:
    """The record of tokens that were not sampled: [tokens, columns] int32."""
    return np.full((tokens, columns), NOTHING, np.int32)


def of_responses(records: list[np.ndarray | None], lengths: list[int]) -> Tensor | None:
    """The records of responses, end to end: [N, K] int32; None if there are none."""
    most = next((record.shape[1] for record in records if record is not None), 0)
    pairs = zip(records, lengths, strict=True)
    rows = [nothing(length, most) if record is None else record for record, length in pairs]
    return torch.from_numpy(np.concatenate(rows)) if most else None


def labels(sampled: Tensor, mask: Tensor) -> Tensor:
    """[n, 1 + K]: the sampled tokens [n], and the tokens of S [n, K]."""
    return torch.cat([sampled[:, None], torch.where(mask == NOTHING, sampled[:, None], mask)], 1)


def restricted(log_probs: Tensor, mask: Tensor) -> Tensor:
    """log_probs [n, 1 + K] of these labels -> log-probs of the sampled tokens over S, [n]."""
    return log_probs[:, 0] - _log_mass(log_probs, mask)


def _log_mass(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return log sum over v in S of pi(v), [n]; 0 where nothing is recorded."""
    known = mask != NOTHING
    is_recorded = known.any(1)
    of_mask = torch.where(is_recorded[:, None], log_probs[:, 1:].masked_fill(~known, -torch.inf), 0.0)
    return torch.where(is_recorded, of_mask.logsumexp(1), 0.0)

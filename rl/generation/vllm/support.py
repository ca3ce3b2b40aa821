"""The tokens that could be sampled, found from vLLM's log-probs of the likeliest tokens (rl/model/sampling_mask.py).

vLLM's log-probs are those of the sampled distribution, -inf outside of the support.
"""

import math
from types import SimpleNamespace

import numpy as np

from rl.generation.engine import Output, SamplingParams
from rl.model.sampling_mask import nothing


def taken_apart(given, sampling: SamplingParams, so_far: Output) -> tuple[SimpleNamespace, np.ndarray]:
    """Return the sampled tokens' token_ids and logprobs, n each, and the record [m + n, sampling.support] of so_far's m
    tokens and these. given: vLLM's FlatLogprobs of n tokens, each followed by the sampling.support likeliest ones, or by the
    whole vocabulary."""
    most = sampling.support
    support = nothing(len(so_far.token_ids) + len(given), most)
    if so_far.support is not None:
        support[: len(so_far.support)] = so_far.support
    sampled = SimpleNamespace(token_ids=[], logprobs=[])
    for row, start, end in zip(support[len(so_far.token_ids) :], given.start_indices, given.end_indices, strict=True):
        sampled.token_ids.append(given.token_ids[start])
        sampled.logprobs.append(given.logprobs[start])
        likeliest = zip(given.token_ids[start + 1 : end], given.logprobs[start + 1 : end], strict=True)
        found = {token: log_prob for token, log_prob in likeliest if log_prob > -math.inf}
        if given.token_ids[start] not in found:  # more tokens are as likely as the k-th than there is room for
            found = dict([*found.items()][: most - 1]) | {given.token_ids[start]: given.logprobs[start]}
        row[: len(found)] = [*found]
    return sampled, support

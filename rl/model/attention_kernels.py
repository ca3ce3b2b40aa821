"""The devices' own attention over packed rows: kernels that pad nothing and hold no [T, T].

A segment of the row (rl/model/attention.py) is a sequence of the kernel. Its queries are its own tokens; its keys are those of
the segment in front of it, then its own. The two may differ in number: the causal mask is aligned at their ends. So each token
is a query once, also in a prompt. A prompt's keys and values are repeated once for each response, but they have few heads where
memory matters. Two passes that are merged by their log-sum-exps would repeat nothing, but neither kernel's backward pass takes
a gradient of these.

- flash: torch.nn.attention.varlen, FlashAttention. Half precision.
- fusion: npu_fusion_attention of torch_npu in its layout TND (tokens, heads, size). Half precision and fp32, 1,000 segments.

rl/ranks/device.py says which of them a tensor's device has. Their results are checked when a learner starts, because a library
that aligned the mask at the beginnings would silently train wrongly. Left out: windows, sinks, dropout.
"""

import functools
import inspect
import itertools
from collections.abc import Callable

import numpy as np
import torch
from transformers import PretrainedConfig

from rl.errors import UserError
from rl.model.kernel_check import differences, first_wrong
from rl.model.packing import tokens_seen
from rl.ranks.device import moved, packed_attention

COMPRESSED = 2048  # rows and columns of the mask that means a causal one of any size
RIGHT_DOWN_CAUSAL = 3  # sparse_mode of npu_fusion_attention: aligned at the ends


class Segments:
    """The segments of a packed row of T tokens as a kernel takes them, except those without tokens."""

    def __init__(self, lengths: list[int], after: list[int], device: torch.device):
        seen = [tokens for tokens, length in zip(tokens_seen(lengths, after), lengths, strict=True) if length]
        self.longest = max(filter(None, lengths)), max(map(len, seen))  # queries, keys
        self.ends = list(itertools.accumulate(filter(None, lengths))), list(itertools.accumulate(map(len, seen)))
        keys = np.concatenate(seen)
        self.device = device
        self.keys = None  # [K] which tokens of the row the keys are of, on the device; None: all, in order
        if len(keys) > self.ends[0][-1]:
            self.keys = moved(torch.from_numpy(keys), device=device)

    def __len__(self) -> int:
        return len(self.ends[0])

    @functools.cached_property
    def cumulative(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ends of queries and of keys behind a 0, int32 [S + 1] each, on the device."""
        return tuple(moved(torch.tensor([0, *ends], dtype=torch.int32), device=self.device) for ends in self.ends)


def attend(kernel: str, segments: Segments, query, key, value, scaling: float) -> torch.Tensor:
    """Attention of each segment to the one in front and to itself. query [T, H, D]; key, value [T, H_kv, D]; -> [T, H, D]."""
    if segments.keys is not None:
        key, value = (x.index_select(0, segments.keys) for x in (key, value))  # [K, H_kv, D]
    return KERNELS[kernel](segments, query, key, value, scaling)


def _flash(segments: Segments, query, key, value, scaling: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options = {"scale": scaling, "window_size": (-1, 0)}  # causal
    if "enable_gqa" in _arguments(varlen_attn):  # torch 2.11 has no such argument: its kernel takes shared heads as they are
        options["enable_gqa"] = query.shape[1] > key.shape[1]
    return varlen_attn(query, key, value, *segments.cumulative, *segments.longest, **options)


@functools.cache
def _arguments(function: Callable) -> set[str]:
    return {*inspect.signature(function).parameters}


def _fusion(segments: Segments, query, key, value, scaling: float) -> torch.Tensor:
    queries, keys = segments.ends
    out, *_ = torch.ops.npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=_later(query.device),
        scale=scaling,
        actual_seq_qlen=queries,
        actual_seq_kvlen=keys,
        sparse_mode=RIGHT_DOWN_CAUSAL,
    )
    return out


KERNELS = {"flash": _flash, "fusion": _fusion}


@functools.cache
def _later(device: torch.device) -> torch.Tensor:
    """True where a key is later than the query."""
    with torch.inference_mode(False):  # it is cached, and a later backward pass may keep it
        return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1).to(device)


# ------------------------------------------------------------------------------------------------------------- the check


def check_kernel(config: PretrainedConfig, sequence_parallel: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UserError if the device's kernel, where it has one, does not compute attention: two responses to one prompt and a
    sequence of its own, with the model's heads on this rank."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    heads, kv = heads // sequence_parallel, max(1, kv // sequence_parallel)
    lengths = [150, 40, 70, 60]
    segments = Segments(lengths, [-1, 0, 0, -1], device)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(sum(lengths), n, size, generator=generator).to(device, dtype) for n in (heads, kv, kv))
    if not (kernel := packed_attention(query, len(segments))):
        return
    where = torch.arange(sum(lengths), device=device)
    sequence = torch.tensor([0, 1, 2, 3], device=device).repeat_interleave(torch.tensor(lengths, device=device))
    sees = (sequence[:, None] == sequence) | ((sequence[:, None] < 3) & (sequence == 0))
    hidden = ~(sees & (where <= where[:, None]))  # [T, T]

    def of_kernel(*inputs):
        return (attend(kernel, segments, *inputs, size**-0.5),)

    def plain(query, key, value):
        key, value = (x.repeat_interleave(heads // kv, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * size**-0.5
        return (torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value),)

    try:
        found = differences(of_kernel, plain, ["values"], queries=query, keys=key, values=value)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:  # of GPUs before compute capability 8.0; of torch before 2.11
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"this device has no attention over packed rows in {dtype} ({reason}). --dtype float32 computes it in parts, "
            "without such a kernel."
        ) from error
    if why := first_wrong(found):
        raise UserError(
            f"the attention of this device ({kernel}, {dtype}) is wrong: {why}. Use the versions of torch that "
            "requirements*.txt name."
        )

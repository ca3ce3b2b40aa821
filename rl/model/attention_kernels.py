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
from rl.ranks.device import moved, packed_attention

COMPRESSED = 2048  # rows and columns of the mask that means a causal one of any size
RIGHT_DOWN_CAUSAL = 3  # sparse_mode of npu_fusion_attention: aligned at the ends
# Largest relative difference of the check at the start. Kernels differ from a plain softmax by rounding, 0.005 in bf16; with a
# mask that is aligned at the beginnings by more than 0.5.
TOLERANCE = 0.03
SIMILAR = 0.75  # sequences at least this fraction of the longest share a bucket: at most a third more cells than tokens


def in_buckets(
    begins: list[int], lengths: list[int]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Put sequences, which lie end to end, into buckets of similar length, the longest first. Return ([(numbers of its
    sequences [S], places of their tokens [S, L], which of these are real [S, L])], the cell of each token [K], with the buckets
    laid end to end)."""
    left = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    buckets = []
    done = 0
    cell_of = torch.empty(sum(lengths), dtype=torch.long)
    while left:
        longest = lengths[left[0]]
        members = [s for s in left if lengths[s] >= SIMILAR * longest]
        left = left[len(members) :]
        begin = torch.tensor([begins[s] for s in members])[:, None]  # [S, 1]
        length = torch.tensor([lengths[s] for s in members])[:, None]
        column = torch.arange(longest)[None]  # [1, L]
        cells = begin + torch.minimum(column, length - 1)  # padding repeats the last token, which is in bounds
        real = column < length
        cell_of[cells[real]] = done + torch.arange(cells.numel()).view_as(cells)[real]
        done += cells.numel()
        buckets.append((torch.tensor(members), cells, real))
    return buckets, cell_of


def tokens_seen(lengths: list[int], after: list[int]) -> list[np.ndarray]:
    """For each segment, the row's tokens that it attends to: those of the segment in front of it, then its own."""
    own = [np.arange(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(lengths)])]
    return [np.concatenate([own[before], own[i]]) if before >= 0 else own[i] for i, before in enumerate(after)]


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

    @property
    def pairs(self) -> int:
        """The pairs of a query and a key that a kernel computes in a layer, for each head."""
        queries, keys = (np.diff(ends, prepend=0) for ends in self.ends)
        return int((queries * (keys - queries) + queries * (queries + 1) // 2).sum())

    @functools.cached_property
    def cumulative(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ends of queries and of keys behind a 0, int32 [S + 1] each, on the device."""
        return tuple(moved(torch.tensor([0, *ends], dtype=torch.int32), device=self.device) for ends in self.ends)


def attend(kernel: str, segments: Segments, query, key, value, scaling: float) -> torch.Tensor:
    """Causal attention of each segment to the one in front of it and to itself. query [T, H, D]; key, value [T, H_kv, D];
    returns [T, H, D]."""
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
    """Raises UserError if the device's kernel, where it has one, does not compute attention: values and gradients of two
    responses to one prompt and of a sequence of its own, against a softmax written out, with the model's heads on this rank."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    heads = heads // sequence_parallel
    kv = max(1, kv // sequence_parallel)
    lengths = [150, 40, 70, 60]
    after = [-1, 0, 0, -1]
    segments = Segments(lengths, after, device)
    generator = torch.Generator().manual_seed(0)  # a run's own numbers stay
    made = [torch.randn(sum(lengths), n, size, generator=generator) for n in (heads, kv, kv, heads)]
    query, key, value, weight = (x.to(device, dtype) for x in made)
    if not (kernel := packed_attention(query, len(segments))):
        return
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        try:
            found = attend(kernel, segments, *leaves, size**-0.5)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:  # of GPUs before compute capability 8.0; of torch before 2.11
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"this device has no attention over packed rows in {dtype} ({reason}). --dtype float32 computes it in parts, "
                "without such a kernel."
            ) from error
        found = [found, *torch.autograd.grad(found, leaves, weight)]
        leaves = [x.detach().float().requires_grad_() for x in (query, key, value)]
        right = _plainly(lengths, after, *leaves, size**-0.5)
        right = [right, *torch.autograd.grad(right, leaves, weight.float())]
    whose = ("values", "gradients of queries", "gradients of keys", "gradients of values")
    for what, a, b in zip(whose, found, right, strict=True):
        if not (difference := float((a.detach().float() - b.detach()).norm() / b.detach().norm())) <= TOLERANCE:
            raise UserError(
                f"the attention of this device ({kernel}, {query.dtype}) is wrong: its {what} differ from a plain softmax by "
                f"{difference:.2g}, {TOLERANCE} is allowed. Use the versions of torch that requirements*.txt name."
            )


def _plainly(lengths: list[int], after: list[int], query, key, value, scaling: float) -> torch.Tensor:
    """Attention of a segment at a time, with all its products. The segment in front, if any, is the row's first."""
    rows = [x.split(lengths) for x in (query, key, value)]
    outputs = []
    for i, before in enumerate(after):
        keys, values = (torch.cat([x[before], x[i]]) if before >= 0 else x[i] for x in rows[1:])
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", rows[0][i], keys) * scaling
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(keys) - lengths[i]).to(query.device)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values))
    return torch.cat(outputs)

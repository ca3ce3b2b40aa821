"""The devices' attention kernels on a CPU, in double precision, for tests of the code around them.

Each has the signature of the real one, and keeps for its backward pass what the real one keeps.
"""

import functools
from collections import Counter

import strict_device
import torch
from torch.nn.attention import varlen

from rl.ranks.device import PACKED_ATTENTION
from tools.plan import fake_kernels

CALLS = Counter()  # of each kernel
MISALIGNED = set()  # kernels that align the mask at the beginnings of queries and keys


@functools.cache
def _define() -> None:
    fake_kernels.define_npu_kernels()
    torch.library.impl("npu::npu_fusion_attention", "cpu", _fusion)
    torch.library.impl("npu::npu_fusion_attention_grad", "cpu", _fusion_gradient)
    varlen._varlen_attn.register_kernel("cpu")(_flash)
    varlen._varlen_attn_backward.register_kernel("cpu")(_flash_gradient)


def give_to_cpu(kind: str) -> None:
    """Give this process's CPU the attention of a `kind` of device from now on."""
    _define()
    PACKED_ATTENTION["cpu"] = PACKED_ATTENTION[kind]


# ---------------------------------------------------------------------------------------------- one segment after another


def segments(query_ends: list[int], key_ends: list[int]):
    begins = zip([0, *query_ends], [0, *key_ends], strict=True)
    return [(slice(a, b), slice(c, d)) for (a, c), b, d in zip(begins, query_ends, key_ends, strict=False)]


def scores(kernel: str, query, key, scale: float) -> torch.Tensor:
    """One segment's: query [Q, H, D], key [K, H, D] -> [H, Q, K], -inf where a key is later."""
    shift = 0 if kernel in MISALIGNED else len(key) - len(query)
    later = torch.arange(len(key))[None] > torch.arange(len(query))[:, None] + shift
    return (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(later, -torch.inf)


def forward(kernel: str, query, key, value, query_ends, key_ends, scale: float):
    """(out [T, H, D], largest score [T, H], sum of exponentials [T, H]) in double precision."""
    CALLS[kernel] += 1
    q, k, v = in_double(query, key, value)
    out, largest, total = torch.empty_like(q), q.new_empty(q.shape[:2]), q.new_empty(q.shape[:2])
    for rows, columns in segments(query_ends, key_ends):
        s = scores(kernel, q[rows], k[columns], scale)
        top = s.amax(-1)
        p = (s - top[..., None]).exp()
        largest[rows], total[rows] = top.t(), p.sum(-1).t()
        out[rows] = torch.einsum("hqk,khd->qhd", p / p.sum(-1, keepdim=True), v[columns])
    return out, largest, total


def backward(kernel: str, grad, query, key, value, out, lse, query_ends, key_ends, scale: float):
    """Gradients of query, key and value, from the output and log-sum-exp [T, H] of the forward pass."""
    CALLS[kernel + " backward"] += 1
    q, k, v = in_double(query, key, value)
    grad, out = grad.double(), out.double()
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, columns in segments(query_ends, key_ends):
        p = (scores(kernel, q[rows], k[columns], scale) - lse[rows].t().double()[..., None]).exp()
        dv[columns] = torch.einsum("hqk,qhd->khd", p, grad[rows])
        dp = torch.einsum("qhd,khd->hqk", grad[rows], v[columns])
        ds = p * (dp - (grad[rows] * out[rows]).sum(-1).t()[..., None]) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, k[columns])
        dk[columns] = torch.einsum("hqk,qhd->khd", ds, q[rows])
    dk, dv = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def in_double(query, key, value) -> list[torch.Tensor]:
    """Return the three in double precision, with one head of keys and values for each query head."""
    groups = query.shape[1] // key.shape[1]
    return [query.double(), *(x.double().repeat_interleave(groups, dim=1) for x in (key, value))]


# --------------------------------------------------------------------------------------------- in the makers' signatures


def _fusion(*given):
    named = {a.name: x for a, x in zip(torch.ops.npu.npu_fusion_attention.default._schema.arguments, given, strict=False)}
    _, *kept, rest, seed, offset, numbers = strict_device.forward(*given)  # refuses what the real one would
    query, ends = named["query"], (named["actual_seq_qlen"], named["actual_seq_kvlen"])
    out, *found = forward("fusion", query, named["key"], named["value"], *ends, named["scale"])
    largest, total = (x.float()[..., None].expand_as(kept[0]).contiguous() for x in found)
    return out.to(query.dtype), largest, total, rest, seed, offset, numbers


def _fusion_gradient(query, key, value, dy, head_num, input_layout, **given):
    strict_device.backward(query, key, value, dy, head_num, input_layout)
    lse = given["softmax_max"][..., 0].double() + given["softmax_sum"][..., 0].double().log()
    ends = given["actual_seq_qlen"], given["actual_seq_kvlen"]
    return *backward("fusion", dy, query, key, value, given["attention_in"], lse, *ends, given["scale_value"]), dy.new_empty(0)


def _flash(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None, *_):
    assert query.dtype in (torch.float16, torch.bfloat16) and query.shape[2] % 8 == 0, "FlashAttention has no kernel"
    assert {x.dtype for x in (cu_seq_q, cu_seq_k)} == {torch.int32} and is_causal and window_size == [-1, 0]
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    ends = cu_seq_q[1:].tolist(), cu_seq_k[1:].tolist()
    out, largest, total = forward("flash", query, key, value, *ends, scale)
    lse = (largest + total.log()).t().float().contiguous()  # [H, T]
    return out.to(query.dtype), lse, torch.zeros(2, dtype=torch.uint64)


def _flash_gradient(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, *given):
    scale, ends = given[4], (cu_seq_q[1:].tolist(), cu_seq_k[1:].tolist())
    return backward("flash", grad_out, query, key, value, out, lse.t(), *ends, scale)

"""Attention kernels of the fake device: their true signatures, and the shapes of what they keep.

npu_fusion_attention has the schema that torch_npu documents (hiascend.com, and docs/context of Ascend/op-plugin), only in
layout TND. It keeps its inputs, its output, and the largest score and the sum of each token and head, 8 times in fp32. CUDA's
`scaled_dot_product_attention` without a mask keeps its output and a number for each token and head; its attention over packed
rows is torch's own operator. Left out: values, which the tests compute with their own kernels, and memory that a kernel only
takes during its call.
"""

from types import SimpleNamespace

import torch

KEPT = 8  # copies of each token's and head's largest score and sum that are kept
_SHARED = (
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, {}int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout=""'
)
FORWARD = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    f"Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., {_SHARED.format('')}) "
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
BACKWARD = (
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, "
    "Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., "
    f"{_SHARED.format('int seed=0, int offset=0, int numels=0, ')}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_libraries: list[torch.library.Library] = []  # keep these alive: definitions go with them


def define_npu_kernels() -> None:
    """torch.ops.npu.npu_fusion_attention with its gradient, on fake tensors. Once a process."""
    library = torch.library.Library("npu", "FRAGMENT")
    _libraries.append(library)
    library.define(FORWARD)
    library.define(BACKWARD)
    torch.library.register_fake("npu::npu_fusion_attention", _forward)
    torch.library.register_fake("npu::npu_fusion_attention_grad", _backward)
    torch.library.register_autograd("npu::npu_fusion_attention", _gradient, setup_context=_keep)


def _forward(*given):
    query = given[0]
    kept = [query.new_empty(*query.shape[:2], KEPT, dtype=torch.float32) for _ in range(2)]
    return torch.empty_like(query), *kept, query.new_empty(0), 0, 0, 0


def by_name(given: tuple) -> SimpleNamespace:
    """Return the arguments of npu_fusion_attention, with defaults for those not given."""
    wanted = torch.ops.npu.npu_fusion_attention.default._schema.arguments
    values = [*given, *(argument.default_value for argument in wanted[len(given) :])]
    return SimpleNamespace(**{argument.name: value for argument, value in zip(wanted, values, strict=True)})


def _backward(query, key, value, dy, head_num, input_layout, **_):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), query.new_empty(0)


def _keep(ctx, inputs, output) -> None:
    ctx.given = a = by_name(inputs)
    out, largest, total, *_ = output
    ctx.save_for_backward(a.query, a.key, a.value, a.atten_mask, out, largest, total)
    a.query = a.key = a.value = a.atten_mask = None  # kept by autograd alone


def _gradient(ctx, dy, *_):
    query, key, value, mask, out, largest, total = ctx.saved_tensors
    a = ctx.given
    kept = {"atten_mask": mask, "softmax_max": largest, "softmax_sum": total, "attention_in": out}
    same = {"actual_seq_qlen": a.actual_seq_qlen, "actual_seq_kvlen": a.actual_seq_kvlen, "sparse_mode": a.sparse_mode}
    given = (query, key, value, dy.contiguous(), a.head_num, a.input_layout)
    dq, dk, dv, _ = torch.ops.npu.npu_fusion_attention_grad(*given, **kept, **same, scale_value=a.scale)
    return dq, dk, dv, *[None] * 17


def define_cuda_kernels() -> None:
    """Define scaled_dot_product_attention without a mask as CUDA has it, in every precision. Call once per process."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _scaled_dot_product_attention, key)


def _scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    if attn_mask is None and not enable_gqa:
        kept = (None, True, dropout_p, is_causal)
        return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, *kept, scale=scale)[0]
    given = (attn_mask, dropout_p, is_causal)
    return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, *given, scale=scale, enable_gqa=enable_gqa)[0]

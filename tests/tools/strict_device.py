"""The fake device of tools/plan, which here also refuses what the real one lacks: operators without a kernel, precisions of
collectives, the allocator's functions, and arguments of npu_fusion_attention."""

import torch
from operators import has_kernel
from torch.utils._pytree import tree_leaves

from rl.model.attention_kernels import COMPRESSED, RIGHT_DOWN_CAUSAL
from rl.ranks.device import PACKED_ATTENTION
from rl.ranks.dist import Ranks
from tools.plan import fake_device, fake_kernels
from tools.plan.fake_device import KIND, OWN, PINNING, FakeDevice, of_no_tensor

# ProcessGroupHCCL.cpp of torch-npu 2.10, checkSupportedDataType: what is summed; what is only sent may be of any precision
HCCL_SUMS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16}
SUMMING = ("allreduce", "reduce", "_reduce")  # prefixes of the names of collectives that sum
NCCL_LACKS = {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64}  # of torch's: no collective takes them


class StrictDevice(FakeDevice):
    kind = KIND  # whose operators and collectives it has

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if OWN.issuperset(types) and not of_no_tensor() and func not in PINNING:
            self._refuse(func, [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _refuse(self, func, tensors: list[torch.Tensor]) -> None:
        """Raise NotImplementedError for an operator or a collective that the device lacks."""
        if all(x.device.type != KIND for x in tensors):
            return
        if not has_kernel(self.kind, func):
            raise NotImplementedError(f"{func}: no kernel on {self.kind}, which computes it on the host or not at all")
        if func.namespace != "c10d":
            return
        if self.kind == KIND and func.name().startswith("c10d::gather_"):
            raise NotImplementedError(f"{func}: HCCL has none, and torch-npu makes one of pickles")
        precisions = {x.dtype for x in tensors if x.device.type == KIND}
        sums = func.name().removeprefix("c10d::").startswith(SUMMING)
        of_npu = precisions - HCCL_SUMS if sums else set()
        lacks = of_npu if self.kind == KIND else precisions & NCCL_LACKS
        if lacks:
            raise NotImplementedError(f"{func}: Unsupported data type {lacks} on {self.kind}")


def start(world_size: int = 1, attention: str = KIND) -> Ranks:
    """Call fake_device.start for a device that has what a `attention` kind of device has."""
    StrictDevice.kind = attention
    fake_kernels._forward, fake_kernels._backward = forward, backward
    ranks = fake_device.start(world_size, attention, StrictDevice)
    if attention == KIND:
        for name in fake_device.ALLOCATOR_CALLS:
            setattr(torch.accelerator, name, _no_allocator)
    return ranks


def _no_allocator(*_, **__):
    raise RuntimeError("Allocator for npu is not a DeviceAllocator.")  # torch's words


# ------------------------------------------------------------------------------------------------ npu_fusion_attention

_forward, _backward = fake_kernels._forward, fake_kernels._backward


def forward(*given):
    """Return what npu_fusion_attention returns, without values. Raise ValueError for arguments that it would refuse."""
    a = fake_kernels.by_name(given)
    dropout = None if a.keep_prob == 1.0 else a.keep_prob
    others = {"pse": a.pse, "padding_mask": a.padding_mask, "prefix": a.prefix, "dropout": dropout}
    ends = a.actual_seq_qlen, a.actual_seq_kvlen
    check(a.query, a.key, a.value, a.head_num, a.input_layout, *ends, a.atten_mask, a.sparse_mode, **others)
    return _forward(*given)


def backward(query, key, value, dy, *given, **named):
    if dy.shape != query.shape or dy.dtype != query.dtype:
        raise ValueError("npu_fusion_attention_grad refuses a gradient unlike the queries")
    return _backward(query, key, value, dy, *given, **named)


def check(query, key, value, head_num: int, layout: str, queries, keys, mask, sparse_mode: int, **others) -> None:
    """Raise ValueError if npu_fusion_attention would refuse the arguments, or silently compute something else."""
    tokens, heads, size = query.shape
    most, precisions = PACKED_ATTENTION["npu"][2], PACKED_ATTENTION["npu"][1]
    wrong = {
        "layout": layout != "TND",
        "precision": query.dtype not in precisions or {key.dtype, value.dtype} != {query.dtype},
        "shapes": key.shape != value.shape or key.shape[2] != size or size > 768,
        "heads": head_num != heads or heads % key.shape[1] or heads > 256,
        "segments": not 0 < len(queries) == len(keys) <= most,
        "ends": queries[-1] != tokens or keys[-1] != len(key) or sorted(queries) != queries or sorted(keys) != keys,
        "mask": mask is None or mask.dtype not in (torch.bool, torch.uint8) or mask.shape != (COMPRESSED, COMPRESSED),
        "sparse mode": sparse_mode != RIGHT_DOWN_CAUSAL,
        "more queries than keys": any(q > k for q, k in zip(_sizes(queries), _sizes(keys), strict=False)),
        "others": others != dict.fromkeys(others),
    }
    if named := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(f"npu_fusion_attention refuses {', '.join(named)}")


def _sizes(ends: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]

"""Integers on the fake device whose values are known because they came from the host: lengths, indices, the grids of images.

Sizes depend on them: torch.nonzero, repeat_interleave, tolist. A device storage of such integers has a twin in host memory, and
results computed from them are also computed there. Results that depend on anything else are unknown. Left out: floating-point
numbers, and large tensors of integers.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

MOST = 1 << 22  # elements of a tensor
aten = torch.ops.aten


def values(x: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's integers, on the host; None if they are unknown. Values written into them are known from then on."""
    if x.dtype not in INTEGERS or x.numel() > MOST or x.device.type == "meta":
        return None
    if not isinstance(x, FakeTensor):
        return x
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype)
    twin = getattr(x.untyped_storage(), "twin", None)
    if twin is None or twin.dtype != x.dtype:
        return None
    return twin.as_strided(x.size(), x.stride(), x.storage_offset())


def remember(x: FakeTensor, known: torch.Tensor) -> None:
    """Record the values of x as known, unless there are too many of them."""
    if x.numel() > MOST:
        return
    storage = x.untyped_storage()
    if x.numel() and not hasattr(storage, "twin") and known.dtype == x.dtype and x.dtype in INTEGERS:
        storage.twin = torch.zeros(storage.nbytes() // x.itemsize, dtype=x.dtype)
        values(x).copy_(known)


def forget(x: torch.Tensor) -> None:
    if isinstance(x, FakeTensor):
        x.untyped_storage().twin = None


def computed(func, args, kwargs):
    """Return the operator's result, computed on the host; None if it depends on unknown values. Integers that it writes into
    are updated."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags or any(values(x) is None for x in tensors):
        return None
    if not tensors and kwargs.get("dtype") not in INTEGERS and func.overloadpacket is not aten.arange:
        return None
    args, kwargs = tree_map(_on_host, (args, kwargs))
    try:
        out = func(*args, **kwargs)
    except NotImplementedError:  # integers that the host has no kernel for
        return None
    return out.zero_() if "empty" in func.overloadpacket.__name__ else out


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


def _on_host(x):
    if isinstance(x, torch.Tensor):
        return values(x)
    return torch.device("cpu") if isinstance(x, torch.device) else x


def chosen(mask: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    """Return the positions that a known mask selects, one tensor per dimension, on the host; None if it is not a known mask."""
    is_mask = mask is not None and mask.dtype == torch.bool
    known = values(mask) if is_mask else None
    return None if known is None else known.nonzero(as_tuple=True)

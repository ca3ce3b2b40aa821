"""Which operators a device has a kernel for: strict_device.py refuses the others.

For CUDA this comes from torch's own table, which torch installs; for an NPU from npu_operators.txt. Operators that torch
composes of others need no kernel, because the fake device sees those. Left out: the parts of operators composed below
autograd, and the precisions that a kernel accepts.
"""

import importlib.resources
import re
from functools import cache
from pathlib import Path

import torch

from tools.plan.fake_device import KIND

LINES = Path(__file__).with_name("npu_operators.txt").read_text().splitlines()
NPU = frozenset(name for line in LINES if not line.startswith("#") for name in line.split())
PART_OF = {"repeat_interleave.Tensor": "repeat_interleave.self_Tensor"}  # operators that an NPU has whole and torch composes
COMPOSED = "CompositeImplicitAutograd", "CompositeExplicitAutograd"
BY_DELEGATE = "CompositeExplicitAutogradNonFunctional"  # most such kernels only call the operator's `out` overload


def has_kernel(kind: str, func: torch._ops.OpOverload) -> bool:
    """Return whether a device of this kind, "cuda" or "npu", computes the operator itself. True for operators of other
    libraries."""
    if func.namespace != "aten" or torch.Tag.pt2_compliant_tag not in func.tags:
        return True
    name, (of_cuda, delegates) = func.name().removeprefix("aten::").removesuffix(".default"), _table()
    kernels, name = (NPU, PART_OF.get(name, name)) if kind == KIND else (of_cuda, name)
    if name in kernels or delegates.get(name) in kernels or _has(func, *COMPOSED):
        return True
    return name not in delegates and _has(func, BY_DELEGATE)


def _has(func: torch._ops.OpOverload, *keys: str) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)


@cache
def _table() -> tuple[frozenset[str], dict[str, str]]:
    """Read torch's table of functions: return the names with their own CUDA kernel, and name -> the `out` overload that
    computes it."""
    path = importlib.resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"
    of_cuda = set()
    delegates = {}
    for entry in re.split(r"^- func: ", path.read_text(), flags=re.MULTILINE)[1:]:
        name = entry.split("(", 1)[0]
        if delegate := re.search(r"^  structured_delegate: (\S+)", entry, re.MULTILINE):
            delegates[name] = delegate[1]
        if re.search(r"^    [\w, ]*\bCUDA\b|^  ufunc_inner_loop:", entry, re.MULTILINE):
            of_cuda.add(name)
    return frozenset(of_cuda), delegates

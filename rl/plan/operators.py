"""Which operators a device has a kernel for: what the fake device (rl/plan/fake_device.py) refuses is what the device lacks.

Of CUDA torch's own table says it, which comes with torch; of an NPU npu_operators.txt does. Operators that torch composes of
others need no kernel: the fake device meets the others. Left out: what an operator composed below autograd is made of, and
which precisions a kernel takes.
"""

import importlib.resources
import re
from functools import cache

import torch

LINES = (importlib.resources.files("rl.plan") / "npu_operators.txt").read_text().splitlines()
NPU = frozenset(name for line in LINES if not line.startswith("#") for name in line.split())
KIND = "npu"  # the devices that have them
PART_OF = {"repeat_interleave.Tensor": "repeat_interleave.self_Tensor"}  # of what an NPU has whole, where torch composes it
COMPOSED = "CompositeImplicitAutograd", "CompositeExplicitAutograd"
BY_DELEGATE = "CompositeExplicitAutogradNonFunctional"  # of such a kernel most only call the operator's `out` overload


def has_kernel(kind: str, func: torch._ops.OpOverload) -> bool:
    """Whether a device of this kind, "cuda" or "npu", computes the operator itself. True for operators that are not torch's."""
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
    """Of torch's table of functions: the names with a CUDA kernel of their own, and name -> the `out` overload that computes
    it."""
    path = importlib.resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"
    of_cuda, delegates = set(), {}
    for entry in re.split(r"^- func: ", path.read_text(), flags=re.MULTILINE)[1:]:
        name = entry.split("(", 1)[0]
        if delegate := re.search(r"^  structured_delegate: (\S+)", entry, re.MULTILINE):
            delegates[name] = delegate[1]
        if re.search(r"^    [\w, ]*\bCUDA\b|^  ufunc_inner_loop:", entry, re.MULTILINE):
            of_cuda.add(name)
    return frozenset(of_cuda), delegates

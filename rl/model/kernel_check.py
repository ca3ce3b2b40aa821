"""A kernel of a device or a package against plain torch, when a learner starts: a wrong one would train wrongly, silently."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rl.ranks.device import is_out_of_memory

# Largest relative difference. Rounding causes up to 0.01, in bf16; a wrong mask, sign or order much more than 0.05.
TOLERANCE = 0.03


def differences(kernel: Callable, plain: Callable, outputs: Sequence[str], **inputs: Tensor) -> dict[str, float]:
    """The relative differences of the kernel's outputs, and of the inputs' gradients, from those of plain torch in fp32, by
    name. kernel, plain: the inputs -> the outputs, several each."""
    generator = torch.Generator().manual_seed(0)  # a run's own numbers stay
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        wide = [x.float().clone().requires_grad_() for x in inputs.values()]
        found = kernel(*leaves)
        right = plain(*wide)
        weights = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in found]
        found = [*found, *torch.autograd.grad(found, leaves, weights)]
        right = [*right, *torch.autograd.grad(right, wide, [weight.float() for weight in weights])]
    names = (*outputs, *(f"gradients of {name.replace('_', ' ')}" for name in inputs))
    triples = zip(names, found, right, strict=True)
    return {name: float((a.detach().float() - b.detach()).norm() / b.detach().norm()) for name, a, b in triples}


def first_wrong(found: dict[str, float]) -> str:
    """The first difference that is too large, in words; empty if none is."""
    for name, off in found.items():
        if not off <= TOLERANCE:  # also true for NaN
            return f"its {name} differ from plain torch's by {off:.2g}, {TOLERANCE} is allowed"
    return ""


def why_not(compared: Callable[..., dict[str, float]], *of) -> str:
    """Return in a line why a kernel is not used: its `compared(*of)` fails or is too large; empty if it can be."""
    try:
        return first_wrong(compared(*of))
    except Exception as error:  # no Triton or driver for this device; another version
        if is_out_of_memory(error):
            raise
        return in_a_line(error)


def in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]

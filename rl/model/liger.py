"""Liger's kernels for norms and gated MLPs on an accelerator, if they are installed and right.

Autograd keeps every step of a norm and of a gate. These kernels (arXiv 2410.10989) keep a norm's input with one number a row,
and the outputs of gate and up, and compute the rest again, so that a layer keeps less for the backward pass. They are compared
with plain torch when a learner starts, and used only if values and gradients agree.

Left out: its rotary embedding and losses, which replace functions of whole modules of transformers; `--compile`, which merges
these passes by itself; layers of other formulas.
"""

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.model.kernel_check import differences, why_not
from rl.ranks.device import is_accelerator

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3VLText")
NORMS = {f"{family}RMSNorm" for family in FAMILIES}  # classes of transformers
MLPS = {f"{family}MLP" for family in FAMILIES}
ROWS = 70  # tokens of the check
EPSILON = 1e-6


def use_kernels(model: nn.Module, dtype: torch.dtype, device: torch.device, say: bool) -> None:
    """Have the norms and MLPs of these families compute by Liger's kernels. Warn if it is installed and not used."""
    if not is_accelerator(device) or importlib.util.find_spec("liger_kernel") is None:
        return
    text = model.config.get_text_config()
    if why := unused(device, dtype, text.hidden_size, getattr(text, "intermediate_size", text.hidden_size)):
        if say:
            print(f"warning: liger-kernel is not used: {why}. Layers keep about twice as much memory.", flush=True)
        return
    for module in model.modules():
        name = type(module).__name__ if type(module).__module__.startswith("transformers.models.") else ""
        if name in NORMS:
            module.forward = functools.partial(_norm, module)
        elif name in MLPS and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
            module.forward = functools.partial(_mlp, module)


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # As Llama's: no offset of the weight, and a gradient in its own memory
    return LigerRMSNormFunction.apply(x, module.weight, module.variance_epsilon, 0.0, "llama", False)


def _mlp(module: nn.Module, x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return module.down_proj(LigerSiLUMulFunction.apply(module.gate_proj(x), module.up_proj(x)))


@functools.cache
def unused(device: torch.device, dtype: torch.dtype, hidden: int, inner: int) -> str:
    """Return the reason why the kernels cannot be used here; empty if they can."""
    return why_not(compared, device, dtype, hidden, inner)


def compared(device: torch.device, dtype: torch.dtype, hidden: int, inner: int) -> dict[str, float]:
    """Return the kernels' differences from plain torch."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def kernels(x, weight, gate, up):
        return LigerRMSNormFunction.apply(x, weight, EPSILON, 0.0, "llama", False), LigerSiLUMulFunction.apply(gate, up)

    def plain(x, weight, gate, up):
        return F.rms_norm(x, (hidden,), weight, EPSILON), F.silu(gate) * up

    generator = torch.Generator().manual_seed(0)
    sizes = {"norms": (ROWS, hidden), "their_weights": (hidden,), "gates": (ROWS, inner), "their_factors": (ROWS, inner)}
    made = {name: torch.randn(size, generator=generator).to(device, dtype) for name, size in sizes.items()}
    return differences(kernels, plain, ["norms", "gates"], **made)

"""The learner's gated MLP, down(silu(gate(x)) * up(x)), which keeps the outputs of gate and up for the backward pass, no more.

Autograd would keep silu(gate) and the input of `down`, too: half of what the widest part of a layer keeps. Both are one pass
over memory each and are computed again, by the same operations in the same order: every bit is that of the module.
Left out: experts, a `down` with a bias, `--compile`, which chooses itself what to compute again.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

WORTH_IT = 2**20  # elements of a product's output; with fewer, one more pass takes longer than memory that is at hand
# transformers' modules of this very formula
CLASSES = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen2MoeMLP", "Qwen3MLP", "Qwen3MoeMLP", "Qwen3VLTextMLP"}


def keep_less(model: nn.Module) -> None:
    """Changes the MLPs of a model that can be. Without gradients they go on as they were."""
    for module in model.modules():
        own = type(module).__module__.startswith("transformers.models.") and type(module).__name__ in CLASSES
        if own and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation") and module.down_proj.bias is None:
            module.forward = functools.partial(_forward, module, module.forward)


def _forward(module: nn.Module, plain, x: torch.Tensor) -> torch.Tensor:
    """x [..., hidden] -> [..., hidden]"""
    if not torch.is_grad_enabled() or x[..., 0].numel() * module.down_proj.in_features < WORTH_IT:
        return plain(x)
    return GatedDown.apply(module.gate_proj(x), module.up_proj(x), module.down_proj.weight)


class GatedDown(torch.autograd.Function):
    """gate, up [..., I], weight [hidden, I] -> [..., hidden]"""

    @staticmethod
    def forward(ctx, gate, up, weight):
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx, grad):
        gate, up, weight = ctx.saved_tensors
        of_gate = of_up = of_weight = None
        silu, of_product = F.silu(gate), grad.matmul(weight)
        if ctx.needs_input_grad[1]:
            of_up = of_product * silu
        if ctx.needs_input_grad[2]:
            of_weight = grad.flatten(0, -2).t().mm(silu.mul_(up).flatten(0, -2))
        if ctx.needs_input_grad[0]:
            of_gate = of_product.mul_(up)
            torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, of_up, of_weight

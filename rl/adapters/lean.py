"""Projections with adapters in the learner's decoder layers, with their backward passes written out (rl/model/lean_layers.py).

As there, values and gradients are those of the plain modules to the bit, and little is kept between the passes: only the
outputs [tokens, rank] of A, in addition to what a layer without adapters keeps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.model import lean_layers
from rl.model.lean_layers import Kind, norm_backward, plain_down, plain_products, rows, scale_of, unit_of


def products(x: Tensor, norm: nn.Module, *projections: nn.Linear) -> tuple[Tensor, ...]:
    """Return each projection [..., m_i] of the norm of x [..., n]. At least one of the projections has an adapter."""
    adapters = next(of.adapters for of in projections if hasattr(of, "adapters"))
    if not adapters.on:
        return plain_products(x, norm, *projections)
    tensors = [getattr(of, part, None) for part in ("weight", "bias", "lora_A", "lora_B") for of in projections]
    return AdaptedProducts.apply(x, x, norm.weight, norm.variance_epsilon, adapters.scale, *tensors)


def down(gate: Tensor, up: Tensor, projection: nn.Linear) -> Tensor:
    """Return the down projection [..., hidden] of gate, up [..., I]."""
    if not projection.adapters.on:
        return plain_down(gate, up, projection)
    if gate.numel() < lean_layers.WORTH_IT and torch.is_grad_enabled():
        return projection(F.silu(gate) * up)
    return AdaptedGatedDown.apply(gate, up, projection.weight, projection.lora_A, projection.lora_B, projection.adapters.scale)


KIND = Kind(products, down)


class AdaptedProducts(torch.autograd.Function):
    """NormedProducts with frozen weights: weights [m_i, n], biases [m_i] or None, A [r, n] and B [m_i, r] or None."""

    @staticmethod
    def forward(ctx, x, _, norm_weight, epsilon, factor, *tensors):
        weights, biases, a, b = _quarters(tensors)
        scale = scale_of(x, epsilon)
        taken = norm_weight * unit_of(x, scale)
        thin = [None if of is None else F.linear(taken, of) for of in a]
        ctx.save_for_backward(x, norm_weight, scale, *weights, *a, *b, *thin)
        ctx.factor = factor
        out = [F.linear(taken, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        with_adapter = zip(out, thin, b, strict=True)
        return tuple(y if t is None else y + F.linear(t, of) * factor for y, t, of in with_adapter)

    @staticmethod
    def backward(ctx, *grads):
        x, norm_weight, scale, *tensors = ctx.saved_tensors
        weights, a, b, thin = _quarters(tensors)
        grads, unit = [rows(grad) for grad in grads], unit_of(x, scale)
        taken = rows(norm_weight * unit)
        of_thin, of_a, of_b = ([None] * len(grads) for _ in range(3))
        for number, grad in enumerate(grads):
            if a[number] is not None:
                scaled = grad * ctx.factor
                of_thin[number] = scaled.mm(b[number])
                of_b[number] = scaled.t().mm(rows(thin[number]))
                of_a[number] = of_thin[number].t().mm(taken)
        del taken
        of_x, of_taken = (None, None), None
        if ctx.needs_input_grad[0]:
            for number in reversed(range(len(grads))):  # in autograd's order
                parts = [] if a[number] is None else [of_thin[number].mm(a[number])]
                for part in (*parts, grads[number].mm(weights[number])):
                    of_taken = part if of_taken is None else of_taken.add_(part)
            of_x = norm_backward(of_taken.view_as(x), x, unit, norm_weight, scale)[:2]
        return *of_x, None, None, None, *[None] * (2 * len(grads)), *of_a, *of_b


class AdaptedGatedDown(torch.autograd.Function):
    """GatedDown with a frozen weight: gate, up [..., I], weight [hidden, I], A [r, I], B [hidden, r] -> [..., hidden]"""

    @staticmethod
    def forward(ctx, gate, up, weight, a, b, factor):
        product = F.silu(gate).mul_(up)
        thin = F.linear(product, a)
        ctx.save_for_backward(gate, up, weight, a, b, thin)
        ctx.factor = factor
        return F.linear(product, weight) + F.linear(thin, b) * factor

    @staticmethod
    def backward(ctx, grad):
        gate, up, weight, a, b, thin = ctx.saved_tensors
        silu, scaled = F.silu(gate), grad * ctx.factor
        of_thin = scaled.matmul(b)
        of_b = rows(scaled).t().mm(rows(thin))
        of_product = of_thin.matmul(a).add_(grad.matmul(weight))
        of_up = of_product * silu
        of_a = rows(of_thin).t().mm(rows(silu.mul_(up)))
        of_gate = of_product.mul_(up)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, of_up, None, of_a, of_b, None


def _quarters(tensors) -> list:
    size = len(tensors) // 4
    return [tensors[first : first + size] for first in range(0, 4 * size, size)]

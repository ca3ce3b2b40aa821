"""The learner's decoder layers with their backward passes written out: fewer passes over memory, and less memory in between.

The forward pass is that of transformers, bit for bit. Autograd would keep each step of a norm, of the rotation and of the gate;
here a layer keeps its input, the scales of its norms, the inputs and outputs of attention, and the outputs of gate and up. The
rest takes one or two passes over memory and is computed again, by the same operations in the same order, so that gradients also
equal autograd's, bit for bit. Modules within a layer are read, not called: if one has a hook, or a projection is of a class
that KINDS does not have, the layer stays as it was. Left out: layers of other formulas, Mistral's, whose windows only its own
modules know, and `--compile`, which merges passes by itself.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.model.attention import attention_forward

WORTH_IT = 2**20  # elements of a product; with fewer, computing the gate again takes longer than keeping it
# transformers' modules of these very formulas
LAYERS = {
    "LlamaDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen2MoeDecoderLayer",
    "Qwen2_5_VLDecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
    "Qwen3VLTextDecoderLayer",
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen2MoeMLP", "Qwen3MLP", "Qwen3MoeMLP", "Qwen3VLTextMLP"}


def keep_less(model: nn.Module) -> None:
    """Changes those layers and MLPs of a model that can be changed."""
    for module in model.modules():
        if _is_one_of(module, LAYERS):
            module.forward = functools.partial(_layer, module, module.forward, _is_gated(module.mlp))
        elif _is_gated(module):
            module.forward = functools.partial(_mlp, module, module.forward)


def _is_one_of(module: nn.Module, names: set[str]) -> bool:
    return type(module).__module__.startswith("transformers.models.") and type(module).__name__ in names


def _is_gated(module: nn.Module) -> bool:
    """Whether it computes down(silu(gate(x)) * up(x))."""
    silu = _is_one_of(module, MLPS) and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return silu and module.down_proj.bias is None


def _may_be_read(module: nn.Module, *projections: nn.Module) -> bool:
    """Whether reading a module's weights does the same as calling it: the projections to be read are in KINDS, and neither the
    module nor a part of it has hooks. Asked in each pass, because a fork may change a loaded model."""
    hooked = any(getattr(part, hooks) for part in (module, *module.children()) for hooks in HOOKS)
    return not hooked and all(type(projection) in KINDS for projection in projections)


def _layer(layer, plain, gated: bool, hidden_states: Tensor, position_embeddings=None, layout=None, **others) -> Tensor:
    """hidden_states [B, L, hidden] -> [B, L, hidden]. `plain` is used without a layout: then attention is transformers' own."""
    x, attention, mlp = hidden_states, layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if layout is None or not (_may_be_read(attention, *projections) and all(map(_may_be_read, norms))):
        others |= {} if layout is None else {"layout": layout}
        return plain(x, position_embeddings=position_embeddings, **others)
    products = _kind(*projections[:3]).products(x, layer.input_layernorm, *projections[:3])
    q, k, v = (product.unflatten(-1, (-1, attention.head_dim)) for product in products)  # [B, L, heads, D]
    if hasattr(attention, "q_norm"):
        q, k = _norm(q, attention.q_norm), _norm(k, attention.k_norm)
    cos, sin = (_mixed(of_angle, attention).unsqueeze(2) for of_angle in position_embeddings)  # [B, L, 1, D]
    q, k = Rotation.apply(q, cos, sin), Rotation.apply(k, cos, sin)
    by_head = (part.transpose(1, 2) for part in (q, k, v))  # [B, heads, L, D]
    window = getattr(attention, "sliding_window", None)
    out, _ = attention_forward(attention, *by_head, None, attention.scaling, layout, sliding_window=window)
    x = attention.o_proj(out.flatten(2)).add_(x)
    if not (gated and _may_be_read(mlp, mlp.gate_proj, mlp.up_proj, mlp.down_proj)):  # experts, another activation
        return mlp(_norm(x, layer.post_attention_layernorm)) + x
    kind = _kind(mlp.gate_proj, mlp.up_proj)
    gate, up = kind.products(x, layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
    return _kind(mlp.down_proj).down(gate, up, mlp.down_proj) + x


def _mixed(of_angle: Tensor, attention: nn.Module) -> Tensor:
    """Cosines or sines [B, L, D]. transformers before 5.6 gives Qwen2.5-VL's layers one for each of a token's three positions,
    [3, B, L, D], of which each attention takes its sections."""
    if of_angle.dim() == 3:
        return of_angle
    sections = attention.config.rope_parameters["mrope_section"] * 2
    return torch.cat([part[number % 3] for number, part in enumerate(of_angle.split(sections, dim=-1))], dim=-1)


def _mlp(module: nn.Module, plain, x: Tensor) -> Tensor:
    """x [..., hidden] -> [..., hidden]"""
    if not _may_be_read(module, module.down_proj):
        return plain(x)
    return _kind(module.down_proj).down(module.gate_proj(x), module.up_proj(x), module.down_proj)


def plain_down(gate: Tensor, up: Tensor, projection: nn.Linear) -> Tensor:
    """gate, up [..., I] -> [..., hidden]"""
    if gate.numel() < WORTH_IT and torch.is_grad_enabled():
        return F.linear(F.silu(gate) * up, projection.weight)
    return GatedDown.apply(gate, up, projection.weight)


class Kind(NamedTuple):
    """The way in which projections of a class are computed."""

    products: Callable[..., tuple[Tensor, ...]]  # as plain_products
    down: Callable[[Tensor, Tensor, nn.Linear], Tensor]  # as plain_down


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
            of_weight = rows(grad).t().mm(rows(silu.mul_(up)))
        if ctx.needs_input_grad[0]:
            of_gate = of_product.mul_(up)
            torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, of_up, of_weight


# ------------------------------------------------------------------------------------------------------ norms, rotation


# Norms take x twice: autograd then adds its two gradients to that of the residual in its own order.


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    return Norm.apply(x, x, norm.weight, norm.variance_epsilon)


def plain_products(x: Tensor, norm: nn.Module, *projections: nn.Linear) -> tuple[Tensor, ...]:
    """x [..., n] -> the output of each projection for the norm of x: [..., m_i]"""
    weights, biases = [p.weight for p in projections], [p.bias for p in projections]
    return NormedProducts.apply(x, x, norm.weight, norm.variance_epsilon, *weights, *biases)


class Norm(torch.autograd.Function):
    """Root mean square norm (arXiv 1910.07467): x [..., n] twice, weight [n], epsilon -> [..., n]"""

    @staticmethod
    def forward(ctx, x, _, weight, epsilon):
        scale = scale_of(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return weight * unit_of(x, scale)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        return *norm_backward(grad, x, unit_of(x, scale), weight, scale), None


class NormedProducts(torch.autograd.Function):
    """Products of the norm: x [..., n] twice, norm's weight [n], epsilon, weights [m_i, n], as many biases [m_i] or None
    -> [..., m_i] each"""

    @staticmethod
    def forward(ctx, x, _, norm_weight, epsilon, *weights_biases):
        half = len(weights_biases) // 2
        weights, biases = weights_biases[:half], weights_biases[half:]
        scale = scale_of(x, epsilon)
        ctx.save_for_backward(x, norm_weight, scale, *weights)
        return tuple(map(functools.partial(F.linear, norm_weight * unit_of(x, scale)), weights, biases))

    @staticmethod
    def backward(ctx, *grads):
        x, norm_weight, scale, *weights = ctx.saved_tensors
        grads, unit = [rows(grad) for grad in grads], unit_of(x, scale)
        normed = rows(norm_weight * unit)
        needed = ctx.needs_input_grad[4:]  # False in a frozen model, and without a bias
        of_weights = [grad.t().mm(normed) if asked else None for grad, asked in zip(grads, needed, strict=False)]
        of_biases = [grad.sum(0) if asked else None for grad, asked in zip(grads, needed[len(grads) :], strict=True)]
        del normed
        of_normed = functools.reduce(Tensor.add_, (grad.mm(w) for grad, w in zip(grads[::-1], weights[::-1], strict=True)))
        of_x = norm_backward(of_normed.view_as(x), x, unit, norm_weight, scale)
        return *of_x, None, *of_weights, *of_biases


def scale_of(x: Tensor, epsilon: float) -> Tensor:
    """[..., n] -> [..., 1] fp32: the factor that brings the mean square to 1"""
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)


def unit_of(x: Tensor, scale: Tensor) -> Tensor:
    """[..., n]: x over its root mean square, which the norm's weight multiplies"""
    return (x.float() * scale).to(x.dtype)


def norm_backward(grad: Tensor, x: Tensor, unit: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """From the gradient of the norm's output: the gradients of x (by its product with the scale, and by the scale itself) and
    of the weight. In half precision the first two are one sum, rounded once."""
    products = grad * unit
    if x.dim() == 4:  # [B, L, heads, D]; autograd sums them head by head
        products = products.transpose(1, 2).contiguous()
    of_weight = products.sum(tuple(range(x.dim() - 1)))
    of_unit = (grad * weight).float()
    of_scale = (of_unit * x.float()).sum(-1, keepdim=True)
    of_mean = -0.5 * of_scale * scale.pow(3)  # of the squares' mean
    of_x, by_scale = of_unit.mul_(scale), (of_mean / x.shape[-1] * 2) * x.float()
    if x.dtype != torch.float32:
        return of_x.add_(by_scale).to(x.dtype), None, of_weight
    return of_x, by_scale, of_weight


class Rotation(torch.autograd.Function):
    """Rotary embedding (arXiv 2104.09864): x [B, L, heads, D], cos, sin [B, L, 1, D] -> as x. Pairs are half of D apart."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        (a, b), (sin_a, sin_b) = x.chunk(2, -1), sin.chunk(2, -1)
        out = x * cos
        of_a, of_b = out.chunk(2, -1)
        of_a.sub_(b * sin_a)
        of_b.add_(a * sin_b)
        return out

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        (a, b), (sin_a, sin_b) = grad.chunk(2, -1), sin.chunk(2, -1)
        out = grad * cos
        of_a, of_b = out.chunk(2, -1)
        of_a.add_(b * sin_b)
        of_b.sub_(a * sin_a)
        return out, None, None


def rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n]"""
    return x.flatten(0, -2)


KINDS = {nn.Linear: Kind(plain_products, plain_down)}  # by class; rl/adapters adds its own


def _kind(*projections: nn.Linear) -> Kind:
    """The kind of projections that are computed together: plain ones may be among those of another kind."""
    return next((KINDS[type(of)] for of in projections if type(of) is not nn.Linear), KINDS[nn.Linear])

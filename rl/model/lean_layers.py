"""The learner's decoder layers with their backward passes written out: fewer passes over memory, and less memory in between.

The forward pass is that of transformers, bit for bit. Autograd would keep each step of a norm, of the rotation and of the gate;
here a layer keeps its input, the scales of its norms, the inputs and outputs of attention, and the outputs of gate and up. The
rest takes one or two passes over memory and is computed again, by the same operations in the same order, so that gradients also
equal autograd's, bit for bit. Modules within a layer are read, not called: if one has a hook, or a projection is of a class
that READABLE does not have, the layer stays as it was. Projections may have adapters (rl/adapters/lora.py). Left out: layers of
other formulas, Mistral's, whose windows only its own modules know, and `--compile`, which merges passes by itself.
"""

import functools
from collections.abc import Iterator

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
READABLE = {nn.Linear}  # classes of projections; rl/adapters adds its own
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
    """Whether reading a module's weights does the same as calling it: the projections to be read are READABLE, and neither the
    module nor a part of it has hooks. Asked in each pass, because a fork may change a loaded model."""
    hooked = any(getattr(part, hooks) for part in (module, *module.children()) for hooks in HOOKS)
    return not hooked and all(type(projection) in READABLE for projection in projections)


def _layer(layer, plain, gated: bool, hidden_states: Tensor, position_embeddings=None, layout=None, **others) -> Tensor:
    """hidden_states [B, L, hidden] -> [B, L, hidden]. `plain` is used without a layout: then attention is transformers' own."""
    x = hidden_states
    attention = layer.self_attn
    mlp = layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    if layout is None or not (_may_be_read(attention, *projections) and all(map(_may_be_read, norms))):
        others |= {} if layout is None else {"layout": layout}
        return plain(x, position_embeddings=position_embeddings, **others)
    products = _products(x, layer.input_layernorm, *projections[:3])
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
    gate, up = _products(x, layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
    return _down(gate, up, mlp.down_proj) + x


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
    return _down(module.gate_proj(x), module.up_proj(x), module.down_proj)


def _adapter(projection: nn.Linear) -> tuple[Tensor | None, Tensor | None, float]:
    """Its matrices A [r, in] and B [out, r], and their scale; none without an adapter, and while adapters are off."""
    adapters = getattr(projection, "adapters", None)
    if adapters is None or not adapters.on:
        return None, None, 1.0
    return projection.lora_A, projection.lora_B, adapters.scale


def _down(gate: Tensor, up: Tensor, projection: nn.Linear) -> Tensor:
    """gate, up [..., I] -> [..., hidden]"""
    if gate.numel() < WORTH_IT and torch.is_grad_enabled():
        return projection(F.silu(gate) * up)
    return GatedDown.apply(gate, up, projection.weight, *_adapter(projection))


class GatedDown(torch.autograd.Function):
    """gate, up [..., I], weight [hidden, I], A [r, I] and B [hidden, r] or None, their scale -> [..., hidden]"""

    @staticmethod
    def forward(ctx, gate, up, weight, a, b, factor):
        product = F.silu(gate).mul_(up)
        out = F.linear(product, weight)
        thin = None
        if a is not None:
            thin = F.linear(product, a)
            out = out + F.linear(thin, b) * factor
        ctx.save_for_backward(gate, up, weight, a, b, thin)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx, grad):
        gate, up, weight, a, b, thin = ctx.saved_tensors
        of_weight = of_a = of_b = None
        silu = F.silu(gate)
        of_product = grad.matmul(weight)
        if a is not None:
            scaled = grad * ctx.factor
            of_thin = scaled.matmul(b)
            of_b = _rows(scaled).t().mm(_rows(thin))
            of_product.add_(of_thin.matmul(a))
        of_up = of_product * silu
        product = _rows(silu.mul_(up))
        if ctx.needs_input_grad[2]:
            of_weight = _rows(grad).t().mm(product)
        if a is not None:
            of_a = _rows(of_thin).t().mm(product)
        of_gate = of_product.mul_(up)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, of_up, of_weight, of_a, of_b, None


# ------------------------------------------------------------------------------------------------------ norms, rotation


# Norms take x twice: autograd then adds its two gradients to that of the residual in its own order.


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    return Norm.apply(x, x, norm.weight, norm.variance_epsilon)


def _products(x: Tensor, norm: nn.Module, *projections: nn.Linear) -> tuple[Tensor, ...]:
    """x [..., n] -> the output of each projection for the norm of x: [..., m_i]"""
    weights, biases = [p.weight for p in projections], [p.bias for p in projections]
    a, b, factors = zip(*map(_adapter, projections), strict=True)
    return NormedProducts.apply(x, x, norm.weight, norm.variance_epsilon, factors, *weights, *biases, *a, *b)


class Norm(torch.autograd.Function):
    """Root mean square norm (arXiv 1910.07467): x [..., n] twice, weight [n], epsilon -> [..., n]"""

    @staticmethod
    def forward(ctx, x, _, weight, epsilon):
        scale = _scale(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return weight * _unit(x, scale)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        return *_norm_backward(grad, x, _unit(x, scale), weight, scale), None


class NormedProducts(torch.autograd.Function):
    """Products of the norm: x [..., n] twice, norm's weight [n], epsilon, a scale for each adapter; then, of all projections,
    the weights [m_i, n], the biases [m_i], A [r, n] and B [m_i, r], of which the last three may be None -> [..., m_i] each"""

    @staticmethod
    def forward(ctx, x, _, norm_weight, epsilon, factors, *tensors):
        weights, biases, a, b = _quarters(tensors)
        scale = _scale(x, epsilon)
        normed = norm_weight * _unit(x, scale)
        thin = [None if of is None else F.linear(normed, of) for of in a]
        ctx.save_for_backward(x, norm_weight, scale, *weights, *a, *b, *thin)
        ctx.factors = factors
        out = map(functools.partial(F.linear, normed), weights, biases)
        with_adapter = zip(out, thin, b, factors, strict=True)
        return tuple(y if t is None else y + F.linear(t, of) * factor for y, t, of, factor in with_adapter)

    @staticmethod
    def backward(ctx, *grads):
        x, norm_weight, scale, *tensors = ctx.saved_tensors
        weights, a, b, thin = _quarters(tensors)
        grads = [_rows(grad) for grad in grads]
        unit = _unit(x, scale)
        normed = _rows(norm_weight * unit)
        needed = _quarters(ctx.needs_input_grad[5:])  # False in a frozen model, and without a bias
        of_weights = [grad.t().mm(normed) if asked else None for grad, asked in zip(grads, needed[0], strict=True)]
        of_biases = [grad.sum(0) if asked else None for grad, asked in zip(grads, needed[1], strict=True)]
        of_thin, of_a, of_b = ([None] * len(grads) for _ in range(3))
        for number, grad in enumerate(grads):
            if a[number] is not None:
                scaled = grad * ctx.factors[number]
                of_thin[number] = scaled.mm(b[number])
                of_b[number] = scaled.t().mm(_rows(thin[number]))
                of_a[number] = of_thin[number].t().mm(normed)
        del normed
        of_x = None, None, None
        if any(ctx.needs_input_grad[:3]):
            of_normed = functools.reduce(Tensor.add_, _in_autograds_order(grads, weights, of_thin, a))
            of_x = _norm_backward(of_normed.view_as(x), x, unit, norm_weight, scale)
        return *of_x, None, None, *of_weights, *of_biases, *of_a, *of_b


def _in_autograds_order(grads, weights, of_thin, a) -> Iterator[Tensor]:
    """The gradients of the norm's output by each product."""
    for number in reversed(range(len(grads))):
        if a[number] is not None:
            yield of_thin[number].mm(a[number])
        yield grads[number].mm(weights[number])


def _quarters(tensors) -> list:
    size = len(tensors) // 4
    return [tensors[first : first + size] for first in range(0, 4 * size, size)]


def _scale(x: Tensor, epsilon: float) -> Tensor:
    """[..., n] -> [..., 1] fp32: the factor that brings the mean square to 1"""
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)


def _unit(x: Tensor, scale: Tensor) -> Tensor:
    """[..., n]: x over its root mean square, which the norm's weight multiplies"""
    return (x.float() * scale).to(x.dtype)


def _norm_backward(
    grad: Tensor, x: Tensor, unit: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """From the gradient of the norm's output: the gradients of x (by its product with the scale, and by the scale itself) and
    of the weight. In half precision the first two are one sum, rounded once."""
    products = grad * unit
    if x.dim() == 4:  # [B, L, heads, D]; autograd sums them head by head
        products = products.transpose(1, 2).contiguous()
    of_weight = products.sum(tuple(range(x.dim() - 1)))
    of_unit = (grad * weight).float()
    of_scale = (of_unit * x.float()).sum(-1, keepdim=True)
    of_mean = -0.5 * of_scale * scale.pow(3)  # of the squares' mean
    of_x = of_unit.mul_(scale)
    by_scale = (of_mean / x.shape[-1] * 2) * x.float()
    if x.dtype != torch.float32:
        return of_x.add_(by_scale).to(x.dtype), None, of_weight
    return of_x, by_scale, of_weight


class Rotation(torch.autograd.Function):
    """Rotary embedding (arXiv 2104.09864): x [B, L, heads, D], cos, sin [B, L, 1, D] -> as x. Pairs are half of D apart."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, *sin.chunk(2, -1))

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        sin_a, sin_b = sin.chunk(2, -1)
        return _rotated(grad, cos, -sin_b, -sin_a), None, None


def _rotated(x: Tensor, cos: Tensor, sin_a: Tensor, sin_b: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    out = x * cos
    of_a, of_b = out.chunk(2, -1)
    of_a.sub_(b * sin_a)
    of_b.add_(a * sin_b)
    return out


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n]"""
    return x.flatten(0, -2)

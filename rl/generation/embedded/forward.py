"""The embedded engine's forward pass of the common model families, written out: decoding with a small model, transformers'
modules spend half of the time around the products. Other families use the model itself (rl/generation/embedded/engine.py).

The results equal the modules' up to rounding: residuals are added within the products, and the two halves of the rotation are
one product with a signed sine.
"""

import torch
import torch.nn.functional as F
from torch import nn

from rl.ranks.device import is_accelerator

FAMILIES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
FAMILIES |= {"Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"}  # rows without images


def has_fast_path(model) -> bool:
    config = model.config.get_text_config()
    biased = getattr(config, "mlp_bias", False)
    return type(model).__name__ in FAMILIES and config.hidden_act == "silu" and not biased


def hidden_states(model, token: torch.Tensor, position: torch.Tensor, layout) -> torch.Tensor:
    """token, position [A] -> hidden states [A, hidden] that predict the next tokens; `layout` keeps the keys and values. All
    tokens are text, so even a model that takes images has one position per token."""
    base = getattr(model.model, "language_model", model.model)
    rows = len(token)
    x = F.embedding(token, base.embed_tokens.weight)  # [A, hidden]
    cos, sin = _angles(base.rotary_emb, x, position[:, None])  # [A, 1, D] each
    half = cos.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    for number, layer in enumerate(base.layers):
        attention, mlp = layer.self_attn, layer.mlp
        h = _norm(x, layer.input_layernorm)
        q, k, v = (_linear(h, p).view(rows, -1, cos.shape[-1]) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        if hasattr(attention, "q_norm"):
            q, k = _norm(q, attention.q_norm), _norm(k, attention.k_norm)
        heads = q.shape[1]
        both = torch.cat([q, k], dim=1)  # [A, H + H_kv, D]
        swapped = torch.cat([both[..., half:], both[..., :half]], dim=-1)
        both = torch.addcmul(both * cos, swapped, sin)
        out = layout.attend(number, both[:, :heads], both[:, heads:], v, attention.scaling)  # [A, H, D]
        x = _add_linear(x, out.flatten(1), attention.o_proj)
        h = _norm(x, layer.post_attention_layernorm)
        h = F.silu(_linear(h, mlp.gate_proj), inplace=True).mul_(_linear(h, mlp.up_proj))
        x = _add_linear(x, h, mlp.down_proj)
    return _norm(x, base.norm)


def _angles(rotary, x: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotation's cosines and sines [A, 1, D] at position [A, 1]. For Qwen2.5-VL, transformers before 5.6 takes and
    returns three per token, which are equal for text."""
    if type(rotary).__name__ != "Qwen2_5_VLRotaryEmbedding" or hasattr(rotary, "recomposition_frequencies"):
        return rotary(x, position)
    cos, sin = rotary(x, position.expand(3, -1, -1))
    return cos[0], sin[0]


def _norm(x: torch.Tensor, norm) -> torch.Tensor:
    if is_accelerator(x.device):
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return (x * scale).to(x.dtype).mul_(norm.weight)


def _linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    if type(layer) is not nn.Linear:  # it has an adapter
        return layer(x)
    if _transposed_is_faster(x, layer.weight):
        out = torch.mm(layer.weight, x.t()).t()
        return out if layer.bias is None else out.add_(layer.bias)
    return F.linear(x, layer.weight, layer.bias)


def _add_linear(x: torch.Tensor, h: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    if type(layer) is not nn.Linear:
        return x + layer(h)
    if _transposed_is_faster(h, layer.weight):
        x = x + torch.mm(layer.weight, h.t()).t()
    else:
        x = torch.addmm(x, h, layer.weight.t())
    return x if layer.bias is None else x.add_(layer.bias)


def _transposed_is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether (W x^T)^T is faster than x W^T: up to 3x on a CPU, with some tens of rows (benchmarks/LOG.md)."""
    return not is_accelerator(x.device) and 16 <= x.shape[0] <= 48 and weight.numel() >= 2**16

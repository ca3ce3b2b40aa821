"""The embedded engine's decoding step: the forward pass of the common model families, written out, and sampling.

With a small model, transformers' modules spend half of the time around the products: on a CPU the pass written out decodes the
demo's model 1.23 times and a model of 30M parameters 1.2 to 1.4 times as fast. Other families use the model itself
(rl/generation/embedded/engine.py). The results equal the modules' up to rounding: residuals are added within the products, and
the two halves of the rotation are one product with a signed sine.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rl.generation.engine import SamplingParams
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


def sample(
    logits: torch.Tensor, uniform: torch.Tensor, settings: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sample by the inverse CDF: one uniform number per token, so each request has a separate stream of random numbers.

    logits [A, V] in any precision, uniform [A] in [0, 1), settings of each row -> (token [A], log-prob of it under the sampled
    distribution [A], the record of the tokens that could be sampled or None).
    """
    temperature = torch.tensor([s.temperature for s in settings]).to(logits.device)
    greedy = temperature == 0
    logits = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    if any(s.truncates for s in settings):
        top_k, top_p, min_p = (
            torch.tensor([getattr(s, name) for s in settings]).to(logits.device) for name in ("top_k", "top_p", "min_p")
        )
        logits = _truncate(logits, top_k, top_p, min_p)
    log_probs = F.log_softmax(logits, dim=-1)
    cdf = log_probs.exp().cumsum(-1)
    last = cdf[:, -1:].contiguous()
    # right=True never picks a token of probability 0; a target rounded up to the whole sum takes the token that reaches it.
    token = torch.searchsorted(cdf, uniform[:, None] * last, right=True)
    token = torch.minimum(token, torch.searchsorted(cdf, last)).squeeze(1)
    token = torch.where(greedy, log_probs.argmax(-1), token)
    log_prob = log_probs.gather(1, token[:, None]).squeeze(1)
    if not (most := max(s.support for s in settings)):
        return token, log_prob, None
    from rl.model import sampling_mask  # late: only --keep-sampling-mask needs it

    return token, log_prob, sampling_mask.of_logits(logits, most)


def _truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set logits to -inf: those below min_p of the largest probability, then those outside the top k (k <= 0: all), then those
    outside the nucleus p. That is vLLM's order. [A, V], [A], [A], [A] -> [A, V]."""
    values, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    drop = values - values[:, :1] < min_p[:, None].log()
    drop |= (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probs = values.masked_fill(drop, -torch.inf).softmax(-1)
    drop |= probs.cumsum(-1) - probs >= top_p[:, None]  # the token that crosses p stays
    drop[:, 0] = False
    return logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)

"""The embedded engine's decoding step: its KV cache, with the layouts through which attention fills and reads it
(rl/model/attention.py), the forward pass of the common model families, written out, and sampling.

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
from rl.model.attention import Packed, linear_layers
from rl.ranks.device import is_accelerator, zeros


class KVCache:
    """One tensor [layers, 2, slots, H_kv, length, D]. Slots 0..A-1 are in use, without holes: a decoding step uses a plain
    slice, and the last response moves to a slot that is freed. On a CPU, unused parts take no memory. Layers with a recurrent
    state are not in the tensor, but in `states`."""

    def __init__(self, config, slots: int, max_length: int, dtype: torch.dtype, device: torch.device):
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        linear = linear_layers(config)
        self.states = None
        if linear:
            from rl.generation.embedded.states import States

            self.states = States(config, slots, dtype, device)
        attending = [layer for layer in range(config.num_hidden_layers) if layer not in linear]
        self.number = {layer: number for number, layer in enumerate(attending)}
        self.shape = (len(attending), 2, slots, heads, max_length, dim)
        on_device = is_accelerator(device)
        self.data = torch.zeros(self.shape, dtype=dtype, device=device) if on_device else zeros(self.shape, dtype)

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots source [n] to slots target [n]."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]
        if self.states:
            self.states.copy_slots(source, target)


class PrefillLayout(Packed):
    """Packed prompts that write their keys and values to the cache: sequence i to slot slots[i]."""

    def __init__(self, lengths: list[int], slots: list[int], cache: KVCache, device: torch.device):
        super().__init__(lengths, device)
        self.cache = cache
        self.slot = torch.tensor(slots).repeat_interleave(torch.tensor(lengths)).to(device)  # [T]
        self.last = torch.tensor(self.begins[1:]).to(device) - 1  # [S]: each sequence's last token
        if cache.states:
            from rl.generation.embedded.states import FillingChain

            self.chain = FillingChain(lengths, slots, cache.states)

    def attend(self, layer: int, query, key, value, scaling: float) -> torch.Tensor:
        number = self.cache.number[layer]
        self.cache.data[number, 0, self.slot, :, self.position_ids] = key
        self.cache.data[number, 1, self.slot, :, self.position_ids] = value
        return super().attend(layer, query, key, value, scaling)


class DecodeLayout:
    """One new token for each of the first A slots, at position position[a]."""

    def __init__(self, position: torch.Tensor, longest: int, cache: KVCache):
        self.cache, self.position, self.longest = cache, position, longest  # longest: tokens after this step
        self.chain = cache.states
        self.row = torch.arange(len(position), device=position.device)
        later = torch.arange(longest, device=position.device)[None] > position[:, None]  # [A, L]
        # a mask of numbers, because a boolean one would be converted in every layer
        mask = torch.zeros(later.shape, dtype=cache.data.dtype, device=position.device)
        self.mask = mask.masked_fill_(later, -torch.inf)[:, None, None]  # [A, 1, 1, L]

    def attend(self, layer: int, query, key, value, scaling: float) -> torch.Tensor:
        """query [A, H, D]; key, value [A, H_kv, D] -> [A, H, D]."""
        rows = len(self.position)
        keys, values = self.cache.data[self.cache.number[layer], :, :rows, :, : self.longest]  # [A, H_kv, L, D] each
        keys[self.row, :, self.position] = key
        values[self.row, :, self.position] = value
        # Query heads that share a key head are put in the query's length dimension, so that no key is copied for them.
        grouped = query.view(rows, key.shape[1], -1, query.shape[2])  # [A, H_kv, H / H_kv, D]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scaling)
        return out.reshape(query.shape)


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

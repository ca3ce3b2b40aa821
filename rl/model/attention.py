"""One attention for packed sequences, which makes training without padding and our engine's KV cache possible.

A Hugging Face model loaded with `attn_implementation=ATTENTION` calls `attention_forward` in every layer. It hands the
queries, keys and values to the `layout` object that was passed to the model's forward: `Packed` here (many sequences end
to end in one row, each attending to itself), or the engine's own layouts, which add a KV cache
(rl/generation/embedded.py).

Left out: sliding windows that the run's sequences outgrow, attention sinks, soft-capping. A model that needs them is refused,
because ignoring them would be silently wrong: `check_supported` reads the config, `attention_forward` looks at what each layer
asks for, and rl/model/policy.py measures.
"""

import functools
import itertools

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PretrainedConfig

from rl.errors import UserError
from rl.model.packing import in_buckets, tokens_seen
from rl.ranks.device import is_accelerator, moved, packed_attention

ATTENTION = "packed"
REMEDY = "Take a model of full causal attention (Llama, Qwen2, Qwen2.5, Qwen3, OLMo-2, ...)."
LINEAR = "linear_attention"  # config.json's word for layers with a recurrent state; rl/model/hybrid/delta_net.py knows some
# Parameters of such layers that decide how a state decays, and of the norm behind it: also in fp32 in the hub's files.
IN_FP32 = (".linear_attn.A_log", ".linear_attn.dt_bias", ".linear_attn.norm.weight")
SHORT = 128  # up to this many tokens a CPU's attention, forward and backward, takes up to six times as long in bf16 as in fp32


class Packed:
    """The layout of a packed row of T tokens: the place of each sequence.

    The row is made of segments, end to end. A segment is a sequence, or one continues another: after[i] is the segment in front
    of it, -1 for none. Responses to one prompt continue it, so that everything but attention computes the prompt once.

    Where the device has a kernel for packed rows (rl/model/attention_kernels.py), it takes the segments as they are. Elsewhere
    attention sees whole sequences, K tokens in all: K = T where no segment is continued twice. Those of similar length are
    gathered into a few padded buckets: right-padding needs no mask under causal attention, since no real token ever looks at a
    later one, and one call per bucket beats one per sequence.
    """

    def __init__(self, segments: list[int], device: torch.device | str = "cpu", after: list[int] | None = None):
        after = after or [-1] * len(segments)
        continued = set(after)
        self.device = torch.device(device)
        self._row = (segments, after)
        sequences = [tokens for i, tokens in enumerate(tokens_seen(segments, after)) if i not in continued]
        self.lengths = [len(s) for s in sequences]
        self.longest = max(self.lengths)
        self.begins = [0, *itertools.accumulate(self.lengths)]  # [S + 1]
        tokens = np.concatenate(sequences)
        _, scatter = np.unique(tokens, return_index=True)
        self.gather_index = torch.from_numpy(tokens)  # [K] on the CPU: the sequences end to end, as indices into the row
        self.scatter_index = torch.from_numpy(scatter)  # [T] on the CPU: the first place of each token in gather_index
        within = np.concatenate([np.arange(n) for n in self.lengths])  # [K]
        self.tokens = len(scatter)  # T
        self.position_ids = moved(torch.from_numpy(within[scatter]), device=self.device)  # [T]

    def inputs(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs of a model's forward for the row [T]: [1, T] each, on the device."""
        return {"input_ids": moved(row[None], device=self.device), "position_ids": self.position_ids[None]}

    def attend(self, layer: int, query, key, value, scaling: float) -> torch.Tensor:
        """Causal attention within each sequence. query [T, H, D]; key, value [T, H_kv, D]; returns [T, H, D]."""
        if kernel := packed_attention(query, len(self._row[0])):
            from rl.model.attention_kernels import attend

            return attend(kernel, self._segments, query, key, value, scaling)
        on_cpu = not is_accelerator(query.device)
        if (groups := query.shape[1] // key.shape[1]) > 1 and not on_cpu:  # a CPU's kernel takes shared heads as they are
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        buckets, output_index = self._buckets
        outputs = []
        for index, length in buckets:
            q, k, v = (_gather(x, index, length) for x in (query, key, value))  # [S, H or H_kv, L, D]
            if length <= SHORT and query.dtype == torch.bfloat16 and query.requires_grad and on_cpu:
                q = q.float()
                k = k.float()
                v = v.float()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=on_cpu)
            outputs.append(out.to(query.dtype).transpose(1, 2).flatten(0, 1).flatten(1))  # [S * L, H * D]
        return torch.cat(outputs).index_select(0, output_index).view_as(query)

    @functools.cached_property
    def chain(self):
        """The row as delta nets see it."""
        from rl.model.hybrid.chain import Chain

        return Chain(*self._row, self.device)

    @functools.cached_property
    def _segments(self):
        from rl.model.attention_kernels import Segments

        return Segments(*self._row, self.device)

    @functools.cached_property
    def _buckets(self) -> tuple[list[tuple[torch.Tensor, int]], torch.Tensor]:
        """([(index into the row of each cell [S * L], L)], [T] the cell of each token's output, buckets end to end)."""
        buckets, cell_of = in_buckets(self.begins, self.lengths)
        indices = [(self.gather_index[cells.flatten()].to(self.device), cells.shape[1]) for _, cells, _ in buckets]
        return indices, cell_of[self.scatter_index].to(self.device)


def _gather(x: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
    """[T, H, D] -> [S, H, L, D]. Rows are gathered flat: the backward of index_select is a fast row-wise index_add."""
    rows = x.flatten(1).index_select(0, index)
    return rows.view(-1, length, *x.shape[1:]).transpose(1, 2)


def attention_forward(module, query, key, value, attention_mask, scaling: float, layout, **wanted):
    """transformers' attention interface: query [B, H, L, D] with B * L tokens in the layout's order -> [B, L, H, D]."""
    _refuse(layout.longest, **wanted)
    batch, _, length, _ = query.shape
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B * L, H, D]
    out = layout.attend(module.layer_idx, *flat, scaling)
    return out.view(batch, length, *out.shape[1:]), None


def _refuse(longest: int, sliding_window=None, softcap=None, s_aux=None, is_causal=None, **_) -> None:
    """Raises UserError if a layer wants more than causal attention. longest: tokens of the longest sequence."""
    if sliding_window is not None and sliding_window < longest:
        raise UserError(f"the model attends to {sliding_window} tokens (sliding window), a sequence has {longest}. {REMEDY}")
    wanted = {"soft-capping": softcap is not None, "sinks": s_aux is not None, "a view of later tokens": is_causal is False}
    if named := [name for name, is_wanted in wanted.items() if is_wanted]:
        raise UserError(f"the model's attention has {' and '.join(named)}, which is not computed here. {REMEDY}")


def linear_layers(config: PretrainedConfig | None) -> list[int]:
    """The numbers of the layers that have a recurrent state instead of attention. config: None for parts of a model."""
    kinds = getattr(config and config.get_text_config(), "layer_types", None) or ()
    return [number for number, kind in enumerate(kinds) if kind == LINEAR]


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The parameter's precision in learners, in engines and on the way between them. dtype: the model's."""
    return torch.float32 if name.endswith(IN_FP32) else dtype


def check_supported(config: PretrainedConfig, where: str, longest: int) -> None:
    """Raises UserError for a config that asks for more than full causal attention over sequences of up to `longest` tokens. A
    window of at least this size is full attention."""
    differ = getattr(config, "per_layer_attributes", None)  # Gemma 4 has heads of two sizes
    if not differ and getattr(config, "global_head_dim", None) not in (None, getattr(config, "head_dim", None)):
        differ = {"head_dim"}  # as transformers 5.5 has it
    if differ:
        raise UserError(f"{where}: its layers differ in {', '.join(sorted(differ))}, which is not supported. {REMEDY}")
    if getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", None) or [1]):
        raise UserError(  # Llama 4 counts a row's tokens from its beginning: a packed row has many sequences
            f"{where}: queries are scaled by their place in the row (attn_temperature_tuning in config.json), not in the "
            f"sequence. Set it to false there if sequences stay below {config.floor_scale} tokens, where it changes nothing."
        )
    windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # layer type -> its size
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", LINEAR, *windows}:
        raise UserError(f"{where}: layers of type {', '.join(sorted(unknown))} are not supported. {REMEDY}")
    if not kinds and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}  # Mistral, Phi-3: one window for all layers
    for kind in sorted(kinds & set(windows)):
        size = getattr(config, windows[kind], None)
        if size is not None and size < longest:
            raise UserError(
                f"{where}: its layers attend to {size} tokens ({windows[kind]} in config.json), but --max-prompt-length + "
                f"--max-response-length is {longest}. Lower them to {size} together, or take a model without windows."
            )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else rope.values():  # one set, or one for each type of layer
        _check_rotary(parameters, config, where, longest)


def _check_rotary(parameters: dict, config: PretrainedConfig, where: str, longest: int) -> None:
    """Raises UserError for rotary embeddings that depend on the other sequences of the batch."""
    kind, stretch = parameters.get("rope_type"), parameters.get("original_max_position_embeddings")
    stretch = stretch or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    if kind in ("dynamic", "longrope") and longest > stretch:
        raise UserError(
            f"{where}: rotary embeddings of type {kind!r} change with the longest sequence of a batch beyond {stretch} tokens, "
            f"but --max-prompt-length + --max-response-length is {longest}. Lower them to {stretch} together."
        )


# No mask function is registered next to it on purpose: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION, attention_forward)

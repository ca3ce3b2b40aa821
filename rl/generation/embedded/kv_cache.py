"""The embedded engine's KV cache, and the two layouts through which attention fills and reads it (rl/model/attention.py)."""

import torch
import torch.nn.functional as F

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

"""The states of delta nets in the embedded engine (rl/generation/embedded.py), written and read together with its KV cache."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rl.model.attention import dtype_of, linear_layers
from rl.model.hybrid.chain import Chain
from rl.model.hybrid.delta_net import carry_states, channels, check_layers
from rl.model.hybrid.rule import one_step
from rl.ranks.device import is_accelerator, zeros


def carry(model: PreTrainedModel, where: str) -> None:
    """Prepare a model's delta nets for the engine. where: names the model in the UserError for layers of another kind."""
    check_layers(model, where)
    carry_states(model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name, parameter.dtype))


class States:
    """For each slot and layer, the last K - 1 inputs of the convolution [layers, slots, C, K - 1] and the recurrent state
    [layers, slots, H, Dk, Dv], always fp32. A decoding step calls it with one new token for each of the first A slots."""

    def __init__(self, config, slots: int, dtype: torch.dtype, device: torch.device):
        self.number = {layer: number for number, layer in enumerate(linear_layers(config))}
        self.device = device
        heads = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        make = functools.partial(torch.zeros, device=device) if is_accelerator(device) else zeros
        self.inputs = make((len(self.number), slots, channels(config), config.linear_conv_kernel_dim - 1), dtype=dtype)
        self.recurrent = make((len(self.number), slots, *heads), dtype=torch.float32)

    def copy_slots(self, source: Tensor, target: Tensor) -> None:
        for of_slots in (self.inputs, self.recurrent):
            of_slots[:, target] = of_slots[:, source]

    def convolved(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """x [A, C], weight [C, K] -> [A, C], summed in fp32 as a prefill's convolution does."""
        inputs = self.inputs[self.number[layer], : len(x)]  # [A, C, K - 1]
        window = torch.cat([inputs, x[..., None]], -1)
        inputs.copy_(window[..., 1:])
        return (window.float() * weight.float()).sum(-1).to(x.dtype)

    def recurred(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """q, k [A, H, Dk], v [A, H, Dv], decay, beta [A, H] -> [A, H, Dv]."""
        return one_step(q, k, v, decay, beta, self.recurrent[self.number[layer], : len(q)])


class FillingChain(Chain):
    """Packed prompts that write their states: sequence i to slot slots[i]."""

    def __init__(self, lengths: list[int], slots: list[int], states: States):
        super().__init__(lengths, [-1] * len(lengths), states.device)
        self.slots = torch.tensor(slots)
        self.states = states

    def convolved(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        kept = weight.shape[1] - 1
        length = torch.tensor(self.lengths)[:, None]
        end = torch.tensor(self.begins[1:])[:, None]
        back = torch.arange(-kept, 0)
        last = torch.where(length + back >= 0, end + back, len(x)).to(x.device)  # [S, K - 1]
        self.states.inputs[self.states.number[layer], self.slots.to(x.device)] = F.pad(x, (0, 0, 0, 1))[last].transpose(1, 2)
        return super().convolved(layer, x, weight)

    def keep(self, layer: int, segments: list[int], states: Tensor) -> None:
        self.states.recurrent[self.states.number[layer], self.slots[segments].to(states.device)] = states.float()

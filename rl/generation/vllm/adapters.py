"""An adapter in vLLM, which gets it without the model's weights (--publish adapter).

It is vLLM's adapter number 1, loaded from peft's files by vLLM's own `add_lora`. vLLM computes with copies in its fused layers,
in which the B matrices are multiplied by alpha / rank: `read_back` reads these.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import torch
import vllm
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import RowParallelLinear

from rl.adapters.files import TENSORS, stored_name, write_config
from rl.adapters.lora import AdapterArgs, adapt
from rl.data.image_prompts import takes_images
from rl.errors import UserError
from rl.generation.vllm.weights import LiveWeights
from rl.model.attention import linear_layers

RANKS = get_args(MaxLoRARanks)
NAME, NUMBER = "policy", 1


class PolicyAdapter:
    """The adapter: before the engine starts, its shapes; after `begin`, also its values."""

    request = LoRARequest(NAME, NUMBER, "loaded by `load`")  # for the engine's requests

    def __init__(self, skeleton: PreTrainedModel, args: AdapterArgs, where: str):
        """skeleton: the model without weights, which gets the adapters' parameters. Raise UserError for other models."""
        no = "--publish adapter with --engine vllm: {} Leave --publish out, or take --engine embedded."
        if not hasattr(BaseLayerWithLoRA, "load_weights"):  # of vLLM 0.23: it finds no weight of a layer with an adapter
            raise UserError(no.format(f"vLLM {vllm.__version__} cannot load a model that has adapters."))
        config = skeleton.config
        if takes_images(config) or linear_layers(config) or getattr(config.get_text_config(), "num_experts_per_tok", None):
            raise UserError(no.format(f"{where} has images, experts or recurrent states."))
        self.skeleton = skeleton
        self.adapters = adapt(skeleton, args, where)
        self.shapes = {name: skeleton.get_parameter(name).shape for name in self.adapters.tensors}
        if (rank := self.adapters.setting.rank) > RANKS[-1]:
            raise UserError(no.format(f"rank {rank} is above vLLM's {RANKS[-1]}."))
        room = next(size for size in RANKS if size >= rank)
        self.settings = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}
        self._new: dict[str, torch.Tensor] = {}

    def begin(self, engine: vllm.LLMEngine, weights: LiveWeights) -> None:
        """Connect to an engine that has started."""
        self._engine, self._weights = engine, weights
        self._manager = weights.worker.model_runner.lora_manager._adapter_manager

    def taken_out(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that are not adapters. Keep copies of the adapters for `load`: the sender may reuse its memory."""
        self._new = {}  # drops those of an update that failed
        for name, tensor in weights:
            if name not in self.shapes:
                yield name, tensor
                continue
            if tensor.shape != self.shapes[name]:
                raise ValueError(f"weight {name} {list(tensor.shape)} does not belong to the engine's adapter")
            self._new[name] = tensor.detach().to("cpu", self._weights.dtype, copy=True).contiguous()

    def load(self) -> None:
        """Let the engine compute with the new adapters. Raise ValueError if some are missing. This is also needed after every
        load of the model, at which vLLM forgets its adapters."""
        if missing := [name for name in self.shapes if name not in self._new]:
            raise ValueError(f"the update lacks {len(missing)} weights of the adapter, {missing[0]} first")
        with tempfile.TemporaryDirectory() as directory:
            save_file({stored_name(name): tensor for name, tensor in self._new.items()}, Path(directory, TENSORS))
            write_config(Path(directory), self.adapters.setting, self.adapters.names, self.skeleton, "")
            self._engine.add_lora(LoRARequest(NAME, NUMBER, directory, load_inplace=True))
        self._new = {}

    def read_back(self, name: str) -> torch.Tensor:
        """Return this rank's part of the adapter's tensor `name`, in the engine's memory; a B is multiplied by alpha / rank."""
        layer, _, part = name.rpartition(".")
        _, _, front = self._weights.holder(f"{layer}.weight")
        own = self.own_part(name, torch.empty(self.shapes[name], device="meta")).shape
        stacked = getattr(self._layer(layer), "lora_a_stacked" if part == "lora_A" else "lora_b_stacked")
        return stacked[len(front)][0, 0, : own[0], : own[1]]

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the value that `read_back` must return if the adapter's tensor is `whole`."""
        layer, _, part = name.rpartition(".")
        module, _, _ = self._weights.holder(f"{layer}.weight")
        by_rows = isinstance(module, RowParallelLinear)  # despite its name, this divides the weight's columns
        if part == "lora_A":
            return self._weights.own_part(f"{layer}.weight", whole) if by_rows else whole
        own = whole if by_rows else self._weights.own_part(f"{layer}.weight", whole)
        return own * self.adapters.scale

    def _layer(self, layer: str) -> nn.Module:
        """Return vLLM's layer that computes the adapter of the learner's `layer`."""
        parent, _, child = self._weights.vllms_name(layer).rpartition(".")
        fused = getattr(self._weights.model, "packed_modules_mapping", {})
        names = [f"{parent}.{child}", *(f"{parent}.{name}" for name, parts in fused.items() if child in parts)]
        return next(self._manager.modules[name] for name in names if name in self._manager.modules)

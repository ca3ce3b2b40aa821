"""The one adapter of a vLLM engine that is sent adapters by themselves (--publish adapter).

vLLM keeps it as adapter 1, made of tensors and never of files, and computes with the rows of it that its fused layers hold:
`read_back` reads them there. Its B are multiplied by alpha / rank when they come in.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import RowParallelLinear

from rl.adapters.files import stored_name
from rl.adapters.lora import AdapterArgs, adapt
from rl.data.image_prompts import takes_images
from rl.errors import UserError
from rl.generation.vllm.weights import LiveWeights
from rl.model.attention import linear_layers

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
NUMBER = 1  # vLLM's own name for the adapter


class OwnAdapter:
    """The adapter: before the engine starts its shape, afterwards its values."""

    request = LoRARequest("policy", NUMBER, "in memory")

    def __init__(self, skeleton: PreTrainedModel, args: AdapterArgs, where: str):
        """skeleton: the model without weights, which gets the adapters' parameters. Raises UserError for what vLLM cannot do."""
        config = skeleton.config
        if takes_images(config) or linear_layers(config) or getattr(config.get_text_config(), "num_experts_per_tok", None):
            raise UserError(
                f"--publish adapter with --engine vllm is for text models whose layers are all dense attention and MLPs, and "
                f"{where} is another one. Leave --publish out, or take --engine transformers."
            )
        self.adapters = adapt(skeleton, args, where)
        self.shapes = {name: skeleton.get_parameter(name).shape for name in self.adapters.tensors}
        rank = self.adapters.setting.rank
        if rank > RANKS[-1]:
            raise UserError(f"--publish adapter with --engine vllm: rank {rank} is above vLLM's {RANKS[-1]}. Leave --publish out.")
        self._new: dict[str, torch.Tensor] = {}

    @property
    def settings(self) -> dict[str, object]:
        """Of vllm.EngineArgs."""
        room = next(size for size in RANKS if size >= self.adapters.setting.rank)
        return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}

    def begin(self, weights: LiveWeights) -> None:
        """Goes into an engine that has started."""
        self._weights = weights
        self._manager = weights.worker.model_runner.lora_manager._adapter_manager
        # vLLM has put a layer with an adapter in the place of each; the weights are in the old ones.
        weights.modules = {name: getattr(module, "base_layer", module) for name, module in weights.modules.items()}

    # -- in

    def taken_out(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The rest of the weights. The adapters among them are kept for `swap`, in copies, because the sender may reuse its
        memory."""
        for name, tensor in weights:
            if name not in self.shapes:
                yield name, tensor
                continue
            if tensor.shape != self.shapes[name]:
                raise ValueError(f"weight {name} {list(tensor.shape)} does not belong to the engine's adapter")
            self._new[name] = tensor.detach().to("cpu", self._weights.dtype, copy=True)

    def swap(self) -> None:
        """Has the engine compute with the adapters that have come. Raises ValueError where some are missing. After every load
        of the model, too: vLLM forgets its adapters at one."""
        if missing := [name for name in self.shapes if name not in self._new]:
            raise ValueError(f"the update lacks {len(missing)} weights of the adapter, {missing[0]} first")
        setting = self.adapters.setting
        tensors = {stored_name(name): tensor for name, tensor in self._new.items()}  # its B change in place
        helper = PEFTHelper(r=setting.rank, lora_alpha=setting.alpha, target_modules="all-linear")
        dtype = self._manager.lora_config.lora_dtype
        self._manager.remove_adapter(NUMBER)
        self._manager.add_adapter(LoRAModel.from_lora_tensors(NUMBER, tensors, helper, device="cpu", dtype=dtype))
        self._manager.activate_adapter(NUMBER)
        self._new = {}

    # -- out

    def read_back(self, name: str) -> torch.Tensor:
        """What this rank computes with for the adapter's tensor `name`, in the engine's own memory: B times alpha / rank."""
        layer, _, part = name.rpartition(".")
        _, _, front = self._weights._holder(f"{layer}.weight")
        module = self._layer(layer)
        own = self.own_part(name, torch.empty(self.shapes[name], device="meta")).shape
        stacked = getattr(module, "lora_a_stacked" if part == "lora_A" else "lora_b_stacked")
        return stacked[len(front or ())][0, 0, : own[0], : own[1]]

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What `read_back` gives if `whole` was sent."""
        layer, _, part = name.rpartition(".")
        module, _, _ = self._weights._holder(f"{layer}.weight")
        by_rows = isinstance(module, RowParallelLinear)  # of its weight's columns, rather
        if part == "lora_A":
            return self._weights.own_part(f"{layer}.weight", whole) if by_rows else whole
        own = whole if by_rows else self._weights.own_part(f"{layer}.weight", whole)
        return own * self.adapters.scale

    def _layer(self, layer: str) -> nn.Module:
        """vLLM's layer that computes the adapter of the learner's `layer`."""
        parent, _, child = self._weights._vllms_name(layer).rpartition(".")
        fused = getattr(self._weights.model, "packed_modules_mapping", {})
        names = [f"{parent}.{child}", *(f"{parent}.{name}" for name, parts in fused.items() if child in parts)]
        return next(self._manager.modules[name] for name in names if name in self._manager.modules)


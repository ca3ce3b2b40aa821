"""The vLLM engine that gets adapters without the model's weights (--publish adapter): swaps, reads back and scores with them.

vLLM holds the policy's adapter as its adapter 1, made from tensors, never from files, and computes with the copies in its fused
layers: `read_back` reads these. The B matrices are multiplied by alpha / rank when they are loaded.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import torch
import vllm
from torch import nn
from transformers import PreTrainedModel
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import RowParallelLinear

from rl.adapters.files import stored_name
from rl.adapters.lora import AdapterArgs, adapt
from rl.errors import UserError
from rl.generation.engine import EngineArgs, Output
from rl.generation.vllm.engine import VLLMEngine
from rl.generation.vllm.weights import LiveWeights
from rl.model.attention import linear_layers
from rl.model.pretrained import takes_images

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts as max_lora_rank
NUMBER = 1  # vLLM's id of the adapter


class AdaptedVLLMEngine(VLLMEngine):
    """`VLLMEngine` whose first update has the adapters and the model, and each later one only the adapters."""

    sleep_level = 1  # keeps the model on the host, because it is not sent again

    def __init__(self, model_path: str, args: EngineArgs, *more, adapters: AdapterArgs):
        """more: as for `VLLMEngine`."""
        self._adapters = adapters
        self._ended: list[Output] = []  # responses that ended during `log_probs_of`
        one_more = dataclasses.replace(args, max_num_seqs=args.max_num_seqs + 1)  # for `log_probs_of`
        super().__init__(model_path, one_more, *more)
        self._limit_running(args.max_num_seqs)
        self.adapter.begin(self.weights)

    @property
    def num_unfinished(self) -> int:
        return super().num_unfinished + len(self._ended)

    def step(self) -> list[Output]:
        ended = self._ended
        self._ended = []
        return ended + super().step()

    def unfinished(self) -> list[Output]:
        return self._ended + super().unfinished()

    def abort(self) -> None:
        super().abort()
        self._ended.clear()

    def read_back(self, name: str) -> torch.Tensor | None:
        return self._part(name).read_back(name)

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return self._part(name).own_part(name, whole)

    def log_probs_of(self, ids: list[int]) -> list[float]:
        """Return the log-prob, at temperature 1, of each token except the first under the current weights. They are computed as
        a request in a slot reserved for it; running requests continue meanwhile."""
        waiting = self._take_waiting()
        key = f"probe {self._updates}"
        found = None
        limit = self._limit
        params = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, flat_logprobs=True)
        self._ask(key, {"prompt_token_ids": ids, "cache_salt": key}, params, priority=-1)
        self._limit_running(limit + 1)
        try:
            while found is None:
                with self._random_numbers():
                    outputs = [out for out in self.engine.step() if out.finished]
                found = next((out.prompt_logprobs.logprobs for out in outputs if out.request_id == key), None)
                self._ended += [self._output(out) for out in outputs if out.request_id != key]
        finally:
            self._limit_running(limit)
            self._hand_over_again(waiting)
        return found

    def _limit_running(self, requests: int) -> None:
        self._limit = requests
        of = self._scheduler
        setattr(of, "max_num_active_reqs" if hasattr(of, "max_num_active_reqs") else "max_num_running_reqs", requests)

    def _further_settings(self, skeleton: PreTrainedModel, where: str) -> dict[str, object]:
        self.adapter = OwnAdapter(skeleton, self._adapters, where)
        return self.adapter.settings

    def _ask(self, key: str, prompt: dict, params: vllm.SamplingParams, priority: int) -> str:
        return self.engine.add_request(key, prompt, params, lora_request=self.adapter.request, priority=priority)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rest = self.adapter.taken_out(weights)
        if self.version < 0:
            self.weights.load(rest)
        elif (again := next(rest, None)) is not None:
            raise ValueError(f"weight {again[0]} was sent before: later updates have adapters alone")
        self.adapter.swap()

    def _part(self, name: str) -> "OwnAdapter | LiveWeights":
        return self.adapter if name in self.adapter.shapes else self.weights


class OwnAdapter:
    """The adapter: before the engine starts, its shapes; afterwards, also its values."""

    request = LoRARequest("policy", NUMBER, "in memory")

    def __init__(self, skeleton: PreTrainedModel, args: AdapterArgs, where: str):
        """skeleton: the model without weights, which gets the adapters' parameters. Raise UserError for other models."""
        if not hasattr(BaseLayerWithLoRA, "load_weights"):  # of vLLM 0.23: it finds no weight of a layer with an adapter
            raise UserError(
                f"--publish adapter with --engine vllm: vLLM {vllm.__version__} cannot load a model that has adapters. Leave "
                "--publish out, or take --engine embedded."
            )
        config = skeleton.config
        if takes_images(config) or linear_layers(config) or getattr(config.get_text_config(), "num_experts_per_tok", None):
            raise UserError(
                f"--publish adapter with --engine vllm: {where} has images, experts or recurrent states. Leave --publish out, "
                "or take --engine embedded."
            )
        self.adapters = adapt(skeleton, args, where)
        self.shapes = {name: skeleton.get_parameter(name).shape for name in self.adapters.tensors}
        rank = self.adapters.setting.rank
        if rank > RANKS[-1]:
            raise UserError(
                f"--publish adapter with --engine vllm: rank {rank} is above vLLM's {RANKS[-1]}. Leave --publish out."
            )
        self._new: dict[str, torch.Tensor] = {}

    @property
    def settings(self) -> dict[str, object]:
        room = next(size for size in RANKS if size >= self.adapters.setting.rank)
        return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}

    def begin(self, weights: LiveWeights) -> None:
        """Connect to an engine that has started."""
        self._weights = weights
        self._manager = weights.worker.model_runner.lora_manager._adapter_manager
        # vLLM has replaced each layer with one that has an adapter; the weights are in its base_layer.
        weights.modules = {name: getattr(module, "base_layer", module) for name, module in weights.modules.items()}

    def taken_out(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that are not adapters. Keep copies of the adapters for `swap`: the sender may reuse its memory."""
        self._new = {}  # drops those of an update that failed
        for name, tensor in weights:
            if name not in self.shapes:
                yield name, tensor
                continue
            if tensor.shape != self.shapes[name]:
                raise ValueError(f"weight {name} {list(tensor.shape)} does not belong to the engine's adapter")
            self._new[name] = tensor.detach().to("cpu", self._weights.dtype, copy=True)

    def swap(self) -> None:
        """Let the engine compute with the new adapters. Raise ValueError if some are missing. This is also needed after every
        load of the model, at which vLLM forgets its adapters."""
        if missing := [name for name in self.shapes if name not in self._new]:
            raise ValueError(f"the update lacks {len(missing)} weights of the adapter, {missing[0]} first")
        setting = self.adapters.setting
        tensors = {stored_name(name): tensor for name, tensor in self._new.items()}  # vLLM scales B in place
        helper = PEFTHelper(r=setting.rank, lora_alpha=setting.alpha, target_modules="all-linear")
        dtype = self._manager.lora_config.lora_dtype
        self._manager.remove_adapter(NUMBER)
        self._manager.add_adapter(LoRAModel.from_lora_tensors(NUMBER, tensors, helper, device="cpu", dtype=dtype))
        self._manager.activate_adapter(NUMBER)
        self._new = {}

    def read_back(self, name: str) -> torch.Tensor:
        """Return this rank's part of the adapter's tensor `name`, in the engine's memory; a B is multiplied by alpha / rank."""
        layer, _, part = name.rpartition(".")
        _, _, front = self._weights.holder(f"{layer}.weight")
        module = self._layer(layer)
        own = self.own_part(name, torch.empty(self.shapes[name], device="meta")).shape
        stacked = getattr(module, "lora_a_stacked" if part == "lora_A" else "lora_b_stacked")
        return stacked[len(front or ())][0, 0, : own[0], : own[1]]

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
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

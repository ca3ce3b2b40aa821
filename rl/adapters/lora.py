"""LoRA (arXiv 2106.09685): the model is frozen, and a trained product of two thin matrices is added to each of its linear
layers.

    y = x W^T + b + alpha / rank * (x A^T) B^T        A [rank, in] random, B [out, rank] zeros

A and B are parameters of the layer itself, whose class is changed in place: every other parameter keeps its name, so files,
shards, publishes and checkpoints need no translation. peft wraps each layer in a module, which renames all parameters. Values
and gradients equal peft's to the bit (tests/adapters). Left out: adapters of a mixture's experts, which are not linear layers,
of the vision tower, of the embedding and of the output layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from rl.adapters.files import AdapterFiles, Setting
from rl.errors import UserError
from rl.model.pretrained import decoder_layers
from rl.model.shards import Block, Shards, local
from rl.ranges import Content, MayChange, Range

ALL = ("all-linear",)
WANTED_RATE = 1e-5  # the smallest --lr with which adapters of a large model have been seen to learn


@dataclass
class AdapterArgs:
    """Adapters (LoRA): the model is frozen, and thin matrices next to its linear layers are trained."""

    lora_rank: Annotated[int, Range(at_least=0)] = 0
    """Rank of the adapters; 0 trains all weights. Adapters need about ten times the --lr of all weights: 1e-3 for the demo, and
    at least 1e-5 for billions of parameters."""
    lora_alpha: Annotated[float, Range(above=0)] = 32.0
    """The adapters' product is multiplied by alpha / rank."""
    lora_target: tuple[str, ...] = ALL
    """Layers that get an adapter: all-linear for all linear layers of the decoder, or suffixes of their names (q_proj
    v_proj)."""
    lora_model: MayChange[Annotated[str | None, Content("model")]] = None
    """Directory of an adapter in peft's format to start from. It sets --lora-rank, --lora-alpha and --lora-target."""
    publish: MayChange[Literal["merged", "adapter"]] = "merged"
    """What engines get at a publish: weights with the adapters merged into them, or only the adapters, to be added to a model
    that is sent once. The latter is small, and slows generation down (vLLM on a CPU: two to three times)."""

    @property
    def publishes_adapters(self) -> bool:
        """Whether only adapters are sent to the engines."""
        return self.adapted and self.publish == "adapter"

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained."""
        return self.lora_rank > 0 or self.lora_model is not None

    def check(self) -> None:
        """Raise UserError if no layer is named."""
        if not self.lora_target:
            raise UserError("--lora-target names no layer. Give all-linear, or names such as q_proj v_proj.")


class AdaptedLinear(nn.Linear):
    """An nn.Linear that was given an adapter in place (`adapt`): lora_A [rank, in], lora_B [out, rank]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]"""
        out = F.linear(x, self.weight, self.bias)
        if not self.adapters.on:
            return out
        return out + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.adapters.scale


class Adapters:
    """The adapters of one model."""

    def __init__(self, setting: Setting, names: Sequence[str], files: AdapterFiles | None):
        """names: the layers that have an adapter. files: the adapter that training starts from."""
        self.setting = setting
        self.names = list(names)
        self.files = files
        self.scale = setting.alpha / setting.rank
        self.weights = {f"{name}.weight" for name in names}  # the parameters that the adapters change
        self.on = True
        self._shards: Shards | None = None

    @property
    def tensors(self) -> list[str]:
        """The names of the adapters' parameters."""
        return [f"{name}.{part}" for name in self.names for part in ("lora_A", "lora_B")]

    def in_words(self, model: nn.Module) -> str:
        """Return a line about the trained parameters."""
        own = sum(model.get_parameter(name).numel() for name in self.tensors)
        all_of_it = sum(parameter.numel() for parameter in model.parameters())
        layers = len(self.names)
        return f"adapters: rank {self.setting.rank} in {layers} linear layers, {own:,} of {all_of_it:,} parameters are trained"

    @torch.no_grad()
    def begin(self, model: nn.Module, seed: int) -> None:
        """Initialize this rank's part of the adapters: with the files' values, or peft's initial ones, drawn whole so that they
        are the same on any number of ranks. Raise UserError if the files do not fit the model."""
        values = self.files.tensors(model, self.tensors) if self.files else {}
        generator = torch.Generator().manual_seed(seed)
        for name in self.tensors:
            parameter = model.get_parameter(name)
            if self.files:
                whole = values[name]
            elif name.endswith("lora_A"):
                bound = 1 / math.sqrt(parameter.shape[1])
                whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            else:
                whole = torch.zeros(parameter.shape)
            local(parameter.data).copy_(whole[Block.of(parameter).slices()])

    @torch.no_grad()
    def whole_a(self, held: dict[str, torch.Tensor], device: torch.device | str) -> dict[str, torch.Tensor]:
        """Return every lora_A [rank, in] in fp32 on the device, by name. held: the adapters' tensors in fp32, sharded. A
        collective."""
        thin = {name: held[name].data for name in self.tensors if name.endswith("lora_A")}
        if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
            return {name: local(tensor).to(device, torch.float32) for name, tensor in thin.items()}
        self._shards = self._shards or Shards(thin)
        return dict(self._shards.whole(thin, torch.device(device), torch.float32))

    def merger(self, held: dict[str, torch.Tensor], device: torch.device) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Return `merge` of the current values, on the device. held: as for `whole_a`. A collective."""
        b = {name: local(held[name].data).to(device) for name in self.tensors if name.endswith("lora_B")}
        return self.merge(self.whole_a(held, device), b)

    def merge(self, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Return a function (a parameter's name, this rank's rows of it) -> these rows with the adapter, fp32(W) + scale * B A,
        or unchanged if there is none. a: from `whole_a`; b: this rank's rows of every lora_B, by name."""

        @torch.no_grad()
        def merged(name: str, rows: torch.Tensor) -> torch.Tensor:
            if name not in self.weights:
                return rows
            layer = name.removesuffix(".weight")
            thin = a[f"{layer}.lora_A"]
            thick = b[f"{layer}.lora_B"]
            return torch.addmm(rows.to(thin.device).float(), thick.to(thin.device).float(), thin, alpha=self.scale)

        return merged


class WithoutAdapters:
    """A policy with its adapters switched off: the model that training started from, without a second copy of it."""

    def __init__(self, policy: nn.Module):
        self._policy = policy

    def __call__(self, *inputs, **more):
        adapters = self._policy.adapters
        adapters.on = False
        try:
            return self._policy(*inputs, **more)
        finally:
            adapters.on = True

    def reshard(self) -> None:
        self._policy.reshard()


def adapt(model: PreTrainedModel, args: AdapterArgs, where: str) -> Adapters:
    """Freeze the model and add adapters, without values, to layers of its decoder. Raise UserError if that is impossible."""
    files = AdapterFiles(args.lora_model) if args.lora_model is not None else None
    setting = files.setting if files else Setting(args.lora_rank, args.lora_alpha, args.lora_target)
    names = _chosen(model, setting, files, where)
    widest = max((min(model.get_submodule(name).weight.shape) for name in names), default=setting.rank)
    if setting.rank > widest:
        raise UserError(
            f"--lora-rank {setting.rank}: the layers of {where} that get an adapter have a rank of at most {widest}, which an "
            "adapter of that rank can already change at will. Lower it."
        )
    adapters = Adapters(setting, names, files)
    model.requires_grad_(False)
    for name in names:
        layer = model.get_submodule(name)
        like = {"dtype": torch.float32, "device": layer.weight.device}
        layer.__class__, layer.adapters = AdaptedLinear, adapters
        layer.lora_A = nn.Parameter(torch.empty(setting.rank, layer.in_features, **like))
        layer.lora_B = nn.Parameter(torch.empty(layer.out_features, setting.rank, **like))
    return adapters


def check_model(model: PreTrainedModel, args: AdapterArgs, where: str) -> None:
    """Raise UserError if the model cannot have these adapters, or flags contradict --lora-model. model: without weights."""
    if args.lora_model is not None:
        AdapterFiles(args.lora_model).check(args)
    if hasattr(model.model, "visual") and not args.freeze_vision_tower:
        raise UserError(
            f"--lora-rank: only the decoder has adapters, and {where} also has a vision tower, which stays as it is. Add "
            "--freeze-vision-tower to say so."
        )
    adapt(model, args, where)


def _chosen(model: PreTrainedModel, setting: Setting, files: AdapterFiles | None, where: str) -> list[str]:
    """Return the names of the layers that get an adapter."""
    of_decoder = {module for layer in decoder_layers(model) for module in layer.modules()}
    linear = [name for name, module in model.named_modules() if module in of_decoder and type(module) is nn.Linear]
    if files:
        if strange := sorted(files.layers - {*linear}):
            raise UserError(f"--lora-model {files.directory}: {strange[0]} is no linear layer of the decoder of {where}.")
        return [name for name in linear if name in files.layers]
    ends = sorted({name.rpartition(".")[2] for name in linear})
    if setting.target != ALL:
        if strange := [end for end in setting.target if not any(f".{name}".endswith(f".{end}") for name in linear)]:
            raise UserError(
                f"--lora-target {strange[0]}: no linear layer in the decoder of {where} has a name that ends so. There are "
                f"{', '.join(ends)}; experts, embeddings, the output layer and a vision tower cannot have adapters here."
            )
        return [name for name in linear if any(f".{name}".endswith(f".{end}") for end in setting.target)]
    others = [module for module in of_decoder if not isinstance(module, nn.Conv1d)]  # each gated delta net has one
    if any(parameter.dim() > 2 for module in others for parameter in module.parameters(recurse=False)):
        raise UserError(
            f"--lora-target all-linear: {where} is a mixture whose experts are no linear layers, and they cannot have adapters "
            f"here. Name the layers that can: --lora-target {' '.join(ends)}."
        )
    return linear


def rate_warnings(args: AdapterArgs, given: set[str]) -> list[str]:
    """Return a warning if --lr is one for training all weights, else none. given: the flags on the command line."""
    if not args.adapted or ("lr" in given and args.lr >= WANTED_RATE):
        return []
    now = f"--lr {args.lr:g}" + ("" if "lr" in given else ", the default,")
    return [f"{now} is low for adapters, which want about ten times the rate of all weights (docs/adapters.md)"]

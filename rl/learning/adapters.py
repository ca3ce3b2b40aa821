"""LoRA (arXiv 2106.09685): the model is frozen, and a trained product of two thin matrices is added to each of its linear
layers.

    y = x W^T + b + alpha / rank * (x A^T) B^T        A [rank, in] random, B [out, rank] zeros

A and B are parameters of the layer itself, whose class is changed in place: every other parameter keeps its name, so files,
shards, publishes and checkpoints need no translation. peft wraps each layer in a module, which renames all parameters. Values
and gradients equal peft's to the bit (tests/learning/test_lora.py). A checkpoint also has the adapters in peft's format.
Left out: adapters of a mixture's experts, which are not linear layers, of the vision tower, of the embedding and of the output
layer; starting from adapters on disk.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl.errors import UserError
from rl.model.pretrained import decoder_layers
from rl.ranks.gathering import Shards
from rl.ranks.shards import Block, local

ALL_LINEAR = ("all-linear",)  # the default of --lora-target


class AdaptedLinear(nn.Linear):
    """An nn.Linear that was given an adapter in place (`adapt`): lora_A [rank, in], lora_B [out, rank]."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]"""
        out = F.linear(x, self.weight, self.bias)
        if not self.adapters.on:
            return out
        return out + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.adapters.scale


class Adapters:
    """The adapters of one model."""

    def __init__(self, args, names: Sequence[str]):
        """args: AdapterArgs of rl/learning/args.py. names: the layers that have an adapter."""
        self.args = args
        self.names = list(names)
        self.tensors = [f"{name}.{part}" for name in names for part in ("lora_A", "lora_B")]  # the adapters' parameters
        self.scale = args.lora_alpha / args.lora_rank
        self.weights = {f"{name}.weight" for name in names}  # the parameters that the adapters change
        self.on = True

    def in_words(self, model: nn.Module) -> str:
        """Return a line about the trained parameters."""
        own = sum(model.get_parameter(name).numel() for name in self.tensors)
        whole = sum(parameter.numel() for parameter in model.parameters())
        layers = f"rank {self.args.lora_rank} in {len(self.names)} linear layers"
        return f"adapters: {layers}, {own:,} of {whole:,} parameters are trained"

    @torch.no_grad()
    def begin(self, model: nn.Module, seed: int) -> None:
        """Give this rank's part of the adapters peft's initial values, drawn whole: the same on any number of ranks."""
        generator = torch.Generator().manual_seed(seed)
        for name in self.tensors:
            parameter = model.get_parameter(name)
            if name.endswith("lora_A"):
                bound = 1 / math.sqrt(parameter.shape[1])
                whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            else:
                whole = torch.zeros(parameter.shape)
            local(parameter.data).copy_(whole[Block.of(parameter).slices()])

    def without(self, policy: nn.Module) -> "WithoutAdapters":
        """Return the model that training started from, which is this policy with its adapters switched off."""
        return WithoutAdapters(policy)

    @torch.no_grad()
    def merger(self, held: dict[str, Tensor], device: torch.device, shards: Shards | None) -> Callable[[str, Tensor], Tensor]:
        """Return a function (a parameter's name, this rank's rows of it) -> these rows with the adapter's current values,
        fp32(W) + scale * B A, or unchanged if there is none. held: the adapters' tensors by name, sharded as `shards` says;
        None: whole. A collective."""
        thin = {name: held[name].data for name in self.tensors if name.endswith("lora_A")}
        alone = ((name, local(tensor).to(device, torch.float32)) for name, tensor in thin.items())
        b = {name: local(held[name].data) for name in self.tensors if name.endswith("lora_B")}
        return self.merge(dict(shards.whole(thin, device, torch.float32) if shards else alone), b)

    def merge(self, a: dict[str, Tensor], b: dict[str, Tensor]) -> Callable[[str, Tensor], Tensor]:
        """Return as `merger` does. a: every lora_A [rank, in]; b: this rank's rows of every lora_B; both by name."""

        @torch.no_grad()
        def merged(name: str, rows: Tensor) -> Tensor:
            if name not in self.weights:
                return rows
            layer = name.removesuffix(".weight")
            thin = a[f"{layer}.lora_A"]
            thick = b[f"{layer}.lora_B"].to(thin.device).float()
            return torch.addmm(rows.to(thin.device).float(), thick, thin, alpha=self.scale)

        return merged

    def save(self, directory: Path, tensors: dict[str, Tensor], model: nn.Module, base: str) -> None:
        """Write the directory in peft's format. tensors: each lora_A [rank, in] and lora_B [out, rank], by name. base: the
        directory or hub name of the model without adapters."""
        ends = {name.rpartition(".")[2] for name in self.names}
        others = {name.rpartition(".")[2] for name, module in model.named_modules() if name not in {*self.names}}
        record = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.args.lora_rank,
            "lora_alpha": self.args.lora_alpha,
            "target_modules": sorted(self.names if ends & others else ends),  # suffixes that only these layers have
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "use_dora": False,
            "use_rslora": False,
        }
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps(record, indent=2))
        stored = {f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}
        save_file(stored, directory / "adapter_model.safetensors")


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


def adapt(model: PreTrainedModel, args, where: str) -> Adapters:
    """Freeze the model and add adapters, without values, to layers of its decoder. Raise UserError if that is impossible."""
    names = _chosen(model, args.lora_target, where)
    adapters = Adapters(args, names)
    model.requires_grad_(False)
    for name in names:
        layer = model.get_submodule(name)
        like = {"dtype": torch.float32, "device": layer.weight.device}
        layer.__class__, layer.adapters = AdaptedLinear, adapters
        layer.lora_A = nn.Parameter(torch.empty(args.lora_rank, layer.in_features, **like))
        layer.lora_B = nn.Parameter(torch.empty(layer.out_features, args.lora_rank, **like))
    return adapters


def check_model(model: PreTrainedModel, args, where: str) -> None:
    """Raise UserError if the model cannot have these adapters. model: without weights."""
    if hasattr(model.model, "visual") and not args.freeze_vision_tower:
        raise UserError(
            f"--lora-rank: only the decoder has adapters, and {where} also has a vision tower, which stays as it is. Add "
            "--freeze-vision-tower to say so."
        )
    adapt(model, args, where)


def _chosen(model: PreTrainedModel, target: tuple[str, ...], where: str) -> list[str]:
    """Return the names of the layers that get an adapter."""
    of_decoder = {module for layer in decoder_layers(model) for module in layer.modules()}
    linear = [name for name, module in model.named_modules() if module in of_decoder and type(module) is nn.Linear]
    ends = sorted({name.rpartition(".")[2] for name in linear})
    if target != ALL_LINEAR:
        if strange := [end for end in target if not any(f".{name}".endswith(f".{end}") for name in linear)]:
            raise UserError(
                f"--lora-target {strange[0]}: no linear layer in the decoder of {where} has a name that ends so. There are "
                f"{', '.join(ends)}; experts, embeddings, the output layer and a vision tower cannot have adapters here."
            )
        return [name for name in linear if any(f".{name}".endswith(f".{end}") for end in target)]
    others = [module for module in of_decoder if not isinstance(module, nn.Conv1d)]  # each gated delta net has one
    if any(parameter.dim() > 2 for module in others for parameter in module.parameters(recurse=False)):
        raise UserError(
            f"--lora-target all-linear: {where} is a mixture whose experts are no linear layers, and they cannot have adapters "
            f"here. Name the layers that can: --lora-target {' '.join(ends)}."
        )
    return linear

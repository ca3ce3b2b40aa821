"""Adapters on disk, in peft's format: adapter_config.json and adapter_model.safetensors.

A layer's two matrices have the names `base_model.model.<layer>.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].
peft itself is not needed. Left out: its variants, which compute something else (DoRA, rsLoRA, ranks by layer, trained biases),
and adapters of parameters outside linear layers (its target_parameters).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rl.errors import UserError
from rl.ranges import flag

CONFIG, TENSORS, DIRECTORY = "adapter_config.json", "adapter_model.safetensors", "adapter"
PATTERN = "adapter_model{suffix}.safetensors"  # of TENSORS, in huggingface_hub's form
PREFIX, SUFFIX = "base_model.model.", ".weight"
# Keys of peft's config whose values do not change what an adapter computes. Any other key that is set makes it another kind.
HARMLESS = {"peft_type", "peft_version", "task_type", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules"}
HARMLESS |= {"layers_to_transform", "layers_pattern", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping"}
HARMLESS |= {"eva_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"}
NOT_SET = (None, False, "none", [], {})
FIRST_VALUES = (True, False, None, "gaussian", "eva", "orthogonal")  # others, such as pissa, also change the model


@dataclass(frozen=True)
class Setting:
    """The numbers and layers that determine an adapter's shape and scale."""

    rank: int
    alpha: float
    target: tuple[str, ...]


class AdapterFiles:
    """An adapter to start from. Raise UserError if there is none, or one of another kind."""

    def __init__(self, directory: str):
        self.directory = Path(directory)
        self._where = f"--lora-model {directory}"
        try:
            self._config = json.loads((self.directory / CONFIG).read_text())
            if not isinstance(self._config, dict) or self._config.get("peft_type") != "LORA":
                raise ValueError("its peft_type is not LORA")
            rank = int(self._config["r"])
            alpha = float(self._config["lora_alpha"])
            target = self._config.get("target_modules") or ()
            target = (target,) if isinstance(target, str) else tuple(sorted(target))
            if rank < 1 or not math.isfinite(alpha):
                raise ValueError(f"r is {rank}, lora_alpha {alpha:g}")
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{self._where}: no adapter can be read there ({reason}). Give a directory that peft wrote."
            ) from None
        for key, value in self._config.items():
            if key not in HARMLESS and value not in (FIRST_VALUES if key == "init_lora_weights" else NOT_SET):
                raise UserError(f"{self._where}: {CONFIG} has {key} {value!r}, which is not supported here.")
        self.setting = Setting(rank, alpha, target)

    def check(self, args) -> None:
        """Raise UserError if a flag contradicts the files. args: AdapterArgs."""
        own = {"lora_rank": self.setting.rank, "lora_alpha": self.setting.alpha, "lora_target": self.setting.target}
        for name, value in own.items():
            asked = getattr(args, name)
            default = type(args).__dataclass_fields__[name].default
            asked = tuple(sorted(asked)) if isinstance(asked, tuple) else asked
            if asked not in (default, value):
                shown = " ".join(value) if isinstance(value, tuple) else value
                raise UserError(f"{flag(name)}: the adapter in {self.directory} has {shown}. Leave the flag out.")
        self.layers  # noqa: B018  (reads the header)

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Each parameter's name -> the name of its tensor in the file."""
        try:
            with safe_open(self.directory / TENSORS, "pt") as file:
                keys = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self._where}: {TENSORS} cannot be read ({error}). Save the adapter again with peft.") from None
        return {key.removeprefix(PREFIX).removesuffix(SUFFIX): key for key in keys}

    @cached_property
    def layers(self) -> set[str]:
        """The names of the layers with an adapter."""
        return {name.rpartition(".")[0] for name in self._stored}

    def tensors(self, model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return parameters of the model by name, whole, on the CPU. Raise UserError if one is not in the file, not finite or
        of another shape."""
        out = {}
        with safe_open(self.directory / TENSORS, "pt") as file:
            for name in names:
                shape = tuple(model.get_parameter(name).shape)
                out[name] = file.get_tensor(self._stored[name]) if name in self._stored else torch.empty(0)
                if out[name].shape != shape:
                    found = list(out[name].shape) if name in self._stored else "not there"
                    raise UserError(f"{self._where}: {name} is {found} and should be {list(shape)}. It is another model's.")
                if not (out[name].is_floating_point() and out[name].isfinite().all()):
                    found = "NaN or infinite" if out[name].is_floating_point() else out[name].dtype
                    raise UserError(f"{self._where}: {self._stored[name]} in {TENSORS} is {found}. Save the adapter again.")
        return out


def stored_name(name: str) -> str:
    """Return the name of parameter `name` in peft's file."""
    return f"{PREFIX}{name}{SUFFIX}"


def write_config(directory: Path, setting: Setting, layers: Sequence[str], model: nn.Module, base: str) -> None:
    """Write adapter_config.json. layers: the names of the layers with an adapter. model: with these layers. base: the directory
    or hub name of the model without adapters."""
    ends = {name.rpartition(".")[2] for name in layers}
    others = {name.rpartition(".")[2] for name, module in model.named_modules() if name not in {*layers}}
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": setting.rank,
        "lora_alpha": setting.alpha,
        "target_modules": sorted(layers if ends & others else ends),  # suffixes that only these layers have
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / CONFIG).write_text(json.dumps(record, indent=2))

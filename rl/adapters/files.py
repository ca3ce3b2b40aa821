"""Adapters on disk, in peft's format: adapter_config.json and adapter_model.safetensors.

A layer's two matrices have the names `base_model.model.<layer>.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank].
peft itself is not needed. Left out: starting from such files.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn

CONFIG, TENSORS, DIRECTORY = "adapter_config.json", "adapter_model.safetensors", "adapter"
PREFIX, SUFFIX = "base_model.model.", ".weight"


def stored_name(name: str) -> str:
    """Return the name of parameter `name` in peft's file."""
    return f"{PREFIX}{name}{SUFFIX}"


def write_config(directory: Path, args, layers: Sequence[str], model: nn.Module, base: str) -> None:
    """Write adapter_config.json. args: AdapterArgs. layers: the names of the layers with an adapter. model: with these layers.
    base: the directory or hub name of the model without adapters."""
    ends = {name.rpartition(".")[2] for name in layers}
    others = {name.rpartition(".")[2] for name, module in model.named_modules() if name not in {*layers}}
    record = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": args.lora_rank,
        "lora_alpha": args.lora_alpha,
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

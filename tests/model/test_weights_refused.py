"""Weights that are read and are of no use: the message names the flag, the tensor and its file."""

import json
import re

import pytest
import torch
from helpers import save_model
from safetensors.torch import load_file, save_file

from rl.adapters.files import AdapterFiles
from rl.errors import UserError
from rl.learning.args import LearnerArgs
from rl.learning.placement import load_policy

FILE = "model.safetensors"
NAMES = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight")


def put(value: float):
    def change(weights: dict, name: str) -> None:
        weights[name].view(-1)[3] = value

    return change


def cast(dtype: torch.dtype):
    def change(weights: dict, name: str) -> None:
        weights[name] = weights[name].to(dtype)

    return change


WRONG = {  # how a tensor is changed -> what is said of it
    "NaN": (put(torch.nan), r"1 of the [\d,]+ values of {name} in model.safetensors are NaN or infinite"),
    "infinite": (put(-torch.inf), r"1 of the [\d,]+ values of {name} in model.safetensors are NaN or infinite"),
    "int8": (cast(torch.int8), r"{name} in model.safetensors is I8, no float"),
    "uint8": (cast(torch.uint8), r"{name} in model.safetensors is U8, no float"),
    "int64": (cast(torch.int64), r"{name} in model.safetensors is I64, no float"),
    "truths": (cast(torch.bool), r"{name} in model.safetensors is BOOL, no float"),
    "eight bits": (cast(torch.float8_e4m3fn), r"{name} in model.safetensors is F8_E4M3, no float"),
}
ROLES = {"policy": "--model", "teacher": "--teacher", "critic": "--critic-model"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", WRONG)
def test_a_tensor_of_no_use_is_named(case, name, ranks, tmp_path):
    """With the flag that gave the model."""
    change, said = WRONG[case]
    save_model("qwen2-tied", tmp_path)
    weights = load_file(tmp_path / FILE)
    change(weights, name)
    save_file(weights, tmp_path / FILE, {"format": "pt"})
    for role, flag in ROLES.items():
        whole = f"^{flag} {re.escape(str(tmp_path))}: {said.format(name=re.escape(name))}"
        with pytest.raises(UserError, match=whole) as refused:
            load_policy(str(tmp_path), LearnerArgs(), ranks, role, False)
        assert str(refused.value).count(str(tmp_path)) == 1


def test_finite_weights_whose_log_probs_are_not(ranks, tmp_path):
    save_model("qwen2-tied", tmp_path)
    weights = load_file(tmp_path / FILE)
    for name in weights:
        weights[name].fill_(3e38)
    save_file(weights, tmp_path / FILE, {"format": "pt"})
    with pytest.raises(UserError, match="differ from transformers' by nan"):
        load_policy(str(tmp_path), LearnerArgs(), ranks, "policy", False)


ADAPTERS = {
    "target_modules a number": ({"target_modules": 5}, "no adapter can be read there .TypeError"),
    "target_modules of kinds": ({"target_modules": ["a", 1]}, "no adapter can be read there .TypeError"),
    "an infinite rank": ({"r": float("inf")}, "no adapter can be read there .OverflowError"),
    "no rank": ({"r": 0}, "no adapter can be read there .ValueError: r is 0"),
    "alpha": ({"lora_alpha": float("nan")}, "no adapter can be read there .ValueError: r is 4, lora_alpha nan"),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapters_configuration(case, tmp_path):
    change, said = ADAPTERS[case]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=f"^--lora-model {re.escape(str(tmp_path))}: {said}"):
        AdapterFiles(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "said"),
    [(torch.full((4, 6), torch.nan), "is NaN or infinite"), (torch.ones(4, 6, dtype=torch.int8), "is torch.int8")],
)
def test_an_adapters_tensors(values, said, tmp_path):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.q_proj.lora_A.weight": values}, tmp_path / "adapter_model.safetensors")
    model = torch.nn.Module()
    model.q_proj = torch.nn.Linear(6, 6)
    model.q_proj.lora_A = torch.nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(UserError, match=f"q_proj.lora_A.weight in adapter_model.safetensors {said}. Save the adapter again"):
        AdapterFiles(str(tmp_path)).tensors(model, ["q_proj.lora_A"])

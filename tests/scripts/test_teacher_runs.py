"""Whole runs with a supervised start and with a teacher, on the demo: what they learn; they resume, replay and divide."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import is_documented, run_script, train
from safetensors.torch import load_file

pytestmark = [pytest.mark.runs, pytest.mark.slow]
SHORT = ("--max-length", 24, "--lr", 1e-3)
RL = 4_160  # responses that GRPO takes to an accuracy of .90, with 64 a step


@pytest.fixture(scope="module")
def supervised(demo_model, tmp_path_factory) -> tuple[dict, Path, str]:
    """A run of 60 steps: its metrics, its directory, what it said."""
    flags = ("--total-training-steps", 60, "--test-freq", 60, "--save-freq", 30, *SHORT)
    out = tmp_path_factory.mktemp("sft")
    metrics, run, done = train("train_sft.py", *flags, "--experiment-name", "run", out=out)
    return metrics, run, done.stdout


@pytest.fixture(scope="module")
def teacher(supervised) -> Path:
    return supervised[1] / "step_000060"


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"step_{step:06d}" / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def accuracies(metrics: dict[int, dict]) -> dict[int, float]:
    return {step: row["val-core/demo/acc/mean@1"] for step, row in metrics.items() if "val-core/demo/acc/mean@1" in row}


def test_a_supervised_start_learns_resumes_and_divides(supervised, tmp_path):
    metrics, run, said = supervised
    assert metrics[60]["val/nll"] < metrics[0]["val/nll"] / 4
    assert all(is_documented(name) for name in metrics[60] if name not in ("step", "time"))
    assert "validation nll" in said and "reward" not in said
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step_000060")
    flags = ("--total-training-steps", 60, "--test-freq", 60, *SHORT)
    run_script("train_sft.py", "--output-dir", tmp_path, "--experiment-name", "run", *flags)
    assert same(weights(tmp_path / "run", 60), weights(run, 60))
    two, _, _ = train("train_sft.py", "--total-training-steps", 2, *SHORT, out=tmp_path / "two", ranks=2)
    assert all(two[step]["actor/nll"] == pytest.approx(metrics[step]["actor/nll"], rel=1e-4) for step in (1, 2))


def test_few_responses_suffice_for_a_teacher(teacher, tmp_path):
    """One response to each of 8 prompts a step: .90 with a tenth of those that training by reward takes. The teacher itself has
    been validated by reward alone: it starts a run."""
    flags = ("--lr", 2e-4, "--lr-scheduler-type", "constant", "--rollout-n", 1, "--total-training-steps", 52, "--test-freq", 52)
    taught = (*flags, "--teacher", teacher, "--teacher-alone", "--teacher-top-k", 4)
    metrics, _, done = train("train_sync.py", *taught, out=tmp_path / "taught")
    assert accuracies(metrics)[0] < 0.5 and RL / 10 >= 52 * 8
    assert accuracies(metrics)[52] >= 0.90
    assert metrics[1]["critic/rewards/max"] == 0 < metrics[1]["critic/score/max"]
    assert metrics[52]["actor/teacher_top_kl"] < metrics[1]["actor/teacher_top_kl"] / 4
    assert "warning" not in done.stdout + done.stderr
    start, _, _ = train("train_sync.py", "--model", teacher, "--total-training-steps", 1, out=tmp_path / "start")
    assert accuracies(start)[0] > 0.9

"""What whole runs learn with a supervised start, a teacher, themselves as a teacher, and a critic."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import accuracies, bits, run_script, train, undocumented

pytestmark = pytest.mark.runs
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


def test_a_supervised_start_learns_resumes_and_divides(supervised, tmp_path):
    metrics, run, said = supervised
    assert metrics[60]["val/nll"] < metrics[0]["val/nll"] / 4
    assert not undocumented(metrics)
    assert "validation nll" in said and "reward" not in said
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step_000060")
    flags = ("--total-training-steps", 60, "--test-freq", 60, *SHORT)
    run_script("train_sft.py", "--output-dir", tmp_path, "--experiment-name", "run", *flags)
    assert bits(tmp_path / "run", 60) == bits(run, 60)
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


# ---------------------------------------------------------------------------------------------------- from itself


def test_the_demo_learns_with_a_critic(demo_model, tmp_path):
    """From stale samples: test_round_trips.py compares the modes. With the flags of docs/teachers.md at a higher rate: how well
    the demo does at the start depends on the processor that taught it. Three standard errors of two shares of 500 are .1; six
    such models gain .20 to .46, and the critic's loss while the policy waits falls to .66 to .78."""
    flags = ("--adv-estimator", "gae", "--critic-warmup", 10, "--critic-ppo-epochs", 4, "--critic-lr", 3e-4, "--lr", 3e-4)
    flags = (*flags, "--total-training-steps", 60, "--test-freq", 60)
    rows, run, _ = train("train_one_step_off.py", *flags, out=tmp_path, ranks=2)
    first, last = map(json.loads, (run / "validations.jsonl").read_text().splitlines())
    assert last["step"] == 60 and last["val-core/demo/acc/mean@1"] > first["val-core/demo/acc/mean@1"] + 0.1
    loss = [rows[step]["critic/vf_loss"] for step in range(1, 16)]
    assert sum(loss[5:]) / 10 < 0.9 * sum(loss[:5]) / 5

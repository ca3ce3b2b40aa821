"""A run resumed or replayed with other flags follows the new flags, and its learning rate follows the training steps."""

import json
import math
import shutil
from pathlib import Path

import pytest
from helpers import run_script
from tiny_vlm import save_vlm

from rl.learning.learner import OptimizerArgs, lr_factor

STEPS, WARM_UP, LR = 8, 2, 1e-3
FLAGS = ["--total-training-steps", STEPS, "--lr-warmup-steps", WARM_UP, "--lr", LR, "--test-freq", 0, "--save-freq", 1]
FLAGS += ["--reward", "tests/programs/random_reward.py:score", "--max-ckpt-to-keep", 0]  # a step without signal has no rate
FLAGS += ["--train-batch-size", 4, "--rollout-n", 2, "--max-response-length", 8]
FOUR_UPDATES = ["--ppo-mini-batch-size", 2, "--ppo-epochs", 2]
KL = ["--kl-reward-coef", 0.001]


def rates(first: int, last: int = STEPS) -> list[float]:
    """Return the learning rates of these steps: half, full, then the cosine over the remaining six steps."""
    of_step = [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * done / 6)) for done in range(6))]
    return [LR * factor for factor in of_step[first - 1 : last]]


def logged(run: Path, name: str, first: int) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if row["step"] >= first]


def resume(run: Path, out: Path, step: int, *flags) -> tuple[Path, str]:
    """The run's copy, resumed after that step."""
    shutil.copytree(run, out / "run")
    how = ["--output-dir", out, "--experiment-name", "run", "--resume-mode", out / "run" / f"step_{step:06d}"]
    done = run_script("train_sync.py", *how, *FLAGS, *flags)
    return out / "run", done.stdout + done.stderr


@pytest.fixture(scope="module")
def recorded(demo_model, tmp_path_factory) -> Path:
    """Four updates a step."""
    out = tmp_path_factory.mktemp("recorded")
    how = ["--output-dir", out, "--experiment-name", "run", "--record-samples", "all"]
    run_script("train_sync.py", *how, *FLAGS, *FOUR_UPDATES, *KL)
    assert logged(out / "run", "actor/lr", 1) == pytest.approx(rates(1))
    return out / "run"


@pytest.mark.runs
@pytest.mark.parametrize(
    ("first", "flags"),
    [(2, ["--ppo-epochs", 1, "--kl-reward-coef", 0.5]), pytest.param(3, ["--ppo-epochs", 3], marks=pytest.mark.slow)],
)
def test_a_replay_with_other_updates_learns_at_the_rates_of_its_steps(recorded, tmp_path, first, flags):
    run_script("replay.py", recorded, "--from-step", first, "--output-dir", tmp_path, "--experiment-name", "again", *flags)
    assert logged(tmp_path / "again", "actor/lr", 1) == pytest.approx(rates(first))
    weight = 0.5 if "--kl-reward-coef" in flags else 0.001
    assert logged(tmp_path / "again", "actor/reward_kl_penalty_coeff", 1) == [weight] * (STEPS + 1 - first)


@pytest.mark.runs
@pytest.mark.parametrize(
    "flags",
    [["--ppo-mini-batch-size", 4], pytest.param(["--ppo-mini-batch-size", 1, "--ppo-epochs", 2], marks=pytest.mark.slow)],
)
def test_a_run_that_resumes_with_other_updates_learns_at_the_rates_of_its_steps(recorded, tmp_path, flags):
    """With fewer updates per step than before, and with more."""
    run, said = resume(recorded, tmp_path, 3, *flags, "--kl-reward-coef", 0.25)
    assert logged(run, "actor/lr", 4) == pytest.approx(rates(4))
    assert logged(run, "actor/reward_kl_penalty_coeff", 4) == [0.25] * (STEPS - 3)
    assert "--kl-reward-coef: was 0.001, is 0.25" in said and f"--ppo-mini-batch-size: was 2, is {flags[1]}" in said


@pytest.mark.slow
def test_another_optimizer_is_named_by_its_flag(recorded, tmp_path):
    """Also in a replay, which compares no flags."""
    where = ["--from-step", 4, "--output-dir", tmp_path]
    done = run_script("replay.py", recorded, *where, "--optim", "adamw_8bit", check=False)
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and f"{recorded}/step_000003 does not fit: exp_avg" in message
    done = run_script("replay.py", recorded, "--optim", "adamw_8bit", "--output-dir", tmp_path)
    assert "--optim adamw_8bit (was adamw)" in done.stdout, "from the first step there is no state"


@pytest.mark.runs
@pytest.mark.parametrize("was", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_another_part_of_a_model_that_trains_is_named_by_its_flag(tmp_path, was):
    model = save_vlm("qwen3-vl", tmp_path / "model")
    program = ("tests/programs/reshard.py", model)
    run_script(*program, json.dumps({"freeze_vision_tower": was}), "-", tmp_path, timeout=120)
    where, flags = tmp_path / "step_000001", json.dumps({"freeze_vision_tower": not was})
    done = run_script(*program, flags, where, tmp_path, check=False, timeout=120)
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"{where} does not fit: " in message and "model.visual." in message and "--freeze-vision-tower" in message


# ------------------------------------------------------------------------------------------------- of the learner by itself


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(("warm_up", "total", "least"), [(0, 10, 0.0), (1, 10, 0.0), (4, 10, 0.1), (10, 10, 0), (25, 500, 0.2)])
def test_the_warm_up_is_one_step_ahead_of_verls(warm_up, total, least, schedule):
    """verl's formulas (get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup). After it both are the same."""

    def of_verl(step: int) -> float:
        if step < warm_up:
            return step / warm_up
        if schedule == "constant":
            return 1.0
        progress = (step - warm_up) / max(1, total - warm_up)
        return max(least, math.cos(math.pi * progress) * (1 - least) * 0.5 + (1 + least) * 0.5)

    args = OptimizerArgs(lr_warmup_steps=warm_up, lr_scheduler_type=schedule, min_lr_ratio=least)
    for step in range(total):
        later = step + 1 if step < warm_up else step
        assert lr_factor(step, total, args) == pytest.approx(of_verl(later), abs=1e-6)
    end = 1.0 if schedule == "constant" else least
    assert lr_factor(10**6, total, args) == pytest.approx(end)
    assert warm_up == total or lr_factor(total, total, args) == pytest.approx(end)
    assert not warm_up or (of_verl(0) == 0 and lr_factor(0, total, args) == 1 / warm_up)

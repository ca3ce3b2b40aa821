"""--val-only: every script validates the model once, records that, and ends; nothing is trained."""

import json
import re

import pytest
from helpers import run_script

import train_async
import train_sync
from rl import flags, parts
from rl.errors import UserError
from rl.setup import CommonArgs, make_learner, set_up


@pytest.mark.runs
@pytest.mark.slow
def test_every_script_validates_the_model_once_and_ends(demo_model, tmp_path):
    """Under one name: a run that is there already is neither resumed nor touched. All three find the same accuracy, which a run
    that trains begins with."""
    words = ("--val-max-samples", 60, "--output-dir", tmp_path, "--experiment-name", "look", "--save-freq", 1)
    first = run_script("train_sync.py", "--total-training-steps", 1, "--test-freq", 1, *words)
    before = {file: file.read_bytes() for file in (tmp_path / "look").rglob("*") if file.is_file()}
    (accuracy,) = re.findall(r"step 0/1 .*validation accuracy (\S+)", first.stdout)
    for number, (script, ranks) in enumerate((("train_sync.py", 2), ("train_one_step_off.py", 2), ("train_async.py", 2)), 2):
        done = run_script(script, "--val-only", "--test-freq", 0, *words, ranks=ranks)
        run = tmp_path / f"look-{number}"
        assert f"step 0/0  validation accuracy {accuracy}\n" in done.stdout and "checkpoint" not in done.stdout
        (validation,) = map(json.loads, (run / "validations.jsonl").read_text().splitlines())
        (row,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        assert f"{validation['val-core/demo/acc/mean@1']:.3f}" == accuracy and row["step"] == validation["step"] == 0
        assert not [*run.glob("step_*"), *run.glob("best")]
    assert before == {file: file.read_bytes() for file in (tmp_path / "look").rglob("*") if file.is_file()}


def test_it_has_no_steps_and_resumes_nothing():
    args = parts.make(train_sync.Args, val_only=True, test_freq=-1, val_before_train=False, total_training_steps=5)
    assert args.total_steps(100) == 0 and args.validates(0, 0)
    assert parts.make(train_async.Args, val_only=True, publish_every=3).schedule.step_of(0, 0) == 0
    with pytest.raises(UserError, match=r"--val-only resumes nothing.* give --model runs/x/step_000002"):
        CommonArgs.check(flags.read(train_sync.Args, args=["--val-only", "--resume-mode", "runs/x/step_000002"]))


@pytest.mark.slow
def test_it_loads_no_model_that_only_training_needs(demo_model, ranks):
    """A reference, a teacher and a critic are there without the flag."""
    given = {"model": demo_model, "teacher": demo_model, "use_kl_loss": True, "adv_estimator": "gae"}
    for only in (False, True):
        args = parts.make(train_sync.Args, **given, val_only=only)
        learner = make_learner(args, set_up(args, train_sync.__file__), ranks)
        assert [model is None for model in (learner.reference, learner.teacher, learner.critic)] == [only] * 3

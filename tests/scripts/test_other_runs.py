"""Other runs: --val-only validates once and ends, accelerate starts the scripts as torchrun does, a long run does not grow in
memory (test_ring.py checks the ring)."""

import ctypes
import gc
import itertools
import json
import re
import subprocess
import sys

import pytest
from helpers import ROOT, environment, run_script
from trainer import Trainer

import train_async
import train_sync
from rl import flags, parts
from rl.errors import UserError
from rl.setup import CommonArgs, make_learner, set_up


@pytest.mark.runs
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
    given = {"model": demo_model, "teacher": demo_model, "kl_loss_coef": 1e-3, "adv_estimator": "gae"}
    for only in (False, True):
        args = parts.make(train_sync.Args, **given, val_only=only)
        learner = make_learner(args, set_up(args, train_sync.__file__), ranks)
        assert [model is None for model in (learner.reference, learner.teacher, learner.critic)] == [only] * 3


@pytest.mark.runs
@pytest.mark.timeout(240)
def test_accelerate_launch_starts_split_ranks(demo_model, tmp_path):
    """accelerate's flag for several ranks on a node is --multi_gpu, on a CPU too."""
    launch = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    flags = ["train_async.py", "--output-dir", tmp_path, "--total-training-steps", "2", "--val-max-samples", "8"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "16 tickets started = 16 trained + 0 dropped + 0 in flight" in done.stdout
    assert len(list(tmp_path.glob("train_async-*/step_000002"))) == 1


STEPS, PASSES, A_STEP = 20, 8, 256  # bytes that a step may leave behind


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc, over all arenas."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def bytes_in_use() -> int:
    """Return the bytes that C code, tensors and Python objects hold."""
    gc.collect()
    read = ctypes.CDLL(None).mallinfo2
    read.restype = MallocInfo
    info = read()
    return info.uordblks + info.hblkhd + 64 * sys.getallocatedblocks()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="counts with glibc's mallinfo2")
def test_the_same_steps_over_and_over_hold_no_more_memory(ranks, demo_model):
    """Twenty steps, again and again from the same weights and tickets, so that every cache is full after the first passes:
    what grows then is lost. Generation, scoring, the update and the engine's new weights."""
    trainer, held = Trainer(demo_model, ranks), []
    for _ in range(PASSES):
        trainer.ticket = 0
        trainer.begin_again()
        trainer.steps(STEPS)
        held.append(bytes_in_use())
    trainer.pool.close()
    growth = held[-1] - held[PASSES // 2]
    assert growth <= A_STEP * STEPS * (PASSES - 1 - PASSES // 2), [b - a for a, b in itertools.pairwise(held)]

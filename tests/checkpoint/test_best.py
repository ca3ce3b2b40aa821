"""The best checkpoint: the one with the highest validation score among those that are saved stays, and `best` links to it."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from rl.checkpoint.files import STATE, TRAINING, checkpoints, step_of
from rl.checkpoint.saver import Best


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's directory with the checkpoints of steps 10 to 50."""
    for step in range(10, 60, 10):
        (tmp_path / f"step_{step:06d}" / TRAINING).mkdir(parents=True)
        (tmp_path / f"step_{step:06d}" / TRAINING / STATE).write_text("{}")
    return tmp_path


def linked(run: Path) -> int | None:
    return step_of(Path(os.readlink(run / "best"))) if (run / "best").is_symlink() else None


def score(run: Path, step: int, value: float) -> None:
    """Record a validation of that step."""
    with open(run / "validations.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "val-core/demo/acc/mean@1": value}) + "\n")


def test_the_earliest_of_the_best_scores_that_are_saved_is_linked(run):
    best = Best(run, is_main=True)
    best.update()
    assert linked(run) is None, "nothing has a score yet"
    expected = {5: None, 10: 10, 20: 20, 30: 20, 40: 20, 50: 50}  # after the score of that step
    for step, value in {5: 0.99, 10: 0.2, 20: 0.6, 30: 0.6, 40: 0.1, 50: 0.7}.items():
        score(run, step, value)
        best.update()
        assert linked(run) == expected[step]
    assert json.loads((run / "best" / "best.json").read_text()) == {"step": 50, "score": 0.7}


def test_the_newest_ones_and_the_best_stay(run):
    best = Best(run, is_main=True)
    score(run, 20, 0.6)
    best.prune(0)
    assert len(checkpoints(run)) == 5
    best.prune(2)
    assert [step_of(path) for path in checkpoints(run)] == [20, 40, 50] and linked(run) == 20
    score(run, 50, 0.7)
    best.prune(1)
    assert [step_of(path) for path in checkpoints(run)] == [50] and linked(run) == 50


@pytest.mark.parametrize("copied", [False, True])
def test_scores_come_back_from_the_record(run, copied):
    """One validation may not choose. In a copy of a run `best` may be a directory."""
    for step, value in {20: 0.2, 40: 0.6}.items():
        score(run, step, value)
    with open(run / "validations.jsonl", "a") as file:
        file.write(json.dumps({"step": 50, "val-core/demo/acc/mean@1": 0.9, "chooses_best": False}) + "\n")
    Best(run, True).update()
    assert linked(run) == 40
    if copied:
        (run / "best").unlink()
        shutil.copytree(run / "step_000040", run / "best")
        Best(run, True).update()
    assert linked(run) == 40 and json.loads((run / "best" / "best.json").read_text()) == {"step": 40, "score": 0.6}


def test_a_full_disk_is_reported_and_tried_again(run, monkeypatch, capfd):
    best = Best(run, True)
    score(run, 20, 0.1)
    best.update()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", full)
        score(run, 40, 0.9)
        best.update()
        best.update()
    said = capfd.readouterr().err
    assert said.count("could not be written: [Errno 28] No space left on device") == 2, said
    assert linked(run) == 20, "the one before stays"
    best.update()
    assert linked(run) == 40 and not capfd.readouterr().err

"""The best checkpoint: the one with the highest validation score among those that are saved stays, and `best` links to it."""

import json
import os
from pathlib import Path

import pytest

from rl.checkpoint.best import Best
from rl.checkpoint.files import STATE, TRAINING, checkpoints, step_of


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

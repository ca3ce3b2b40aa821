"""--logger with the real packages: what each has of a run that is resumed. W&B is a requirement; the others are tested where
they are installed (pip install mlflow-skinny swanlab trackio)."""

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_validations import ACCURACY, make_run, resume

from rl.errors import UserError
from rl.record import validations

ROWS = [{"prompt": "1+1=", "response": "2 | <b>", "ground_truth": "2", "score": 1.0}]
SCORE = "critic/score/mean"
Values = dict[str, list[tuple[int, float]]]  # name -> step and value of all that was logged


def of_mlflow(directory: Path) -> Values:
    import mlflow

    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["lr"] == "0.0001"
    assert [file.path for file in client.list_artifacts(found.info.run_id, "val_generations")]
    names = {"critic/score/mean": SCORE, "val-core/demo/acc/mean_at_1": ACCURACY}
    return {
        ours: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)] for name, ours in names.items()
    }


def of_trackio(directory: Path) -> Values:
    (file,) = Path(os.environ["TRACKIO_DIR"]).glob("mine*.db")
    with sqlite3.connect(file) as database:
        rows = [(step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics order by id")]
        assert len({*database.execute("select run_name from metrics")}) == 1
    assert any("val/generations" in metrics for _, metrics in rows)
    return {name: [(step, metrics[name]) for step, metrics in rows if name in metrics] for name in (SCORE, ACCURACY)}


def of_swanlab(directory: Path) -> None:
    """Its files are its own: that there is one for each start is all that is asked."""
    assert len([*directory.glob("run-*")]) == 2


def of_wandb(directory: Path) -> None:
    assert [*directory.glob("wandb/offline-run-*")]


READ: dict[str, Callable] = {"wandb": of_wandb, "mlflow": of_mlflow, "swanlab": of_swanlab, "trackio": of_trackio}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.setenv(name, "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_a_logger_gets_each_step_and_validation_at_its_step(name, tmp_path, offline):
    """Also after a resume, in the same run. A number that is not finite ends nothing, nor does Ctrl-C become another's."""
    pytest.importorskip(name)
    handler = signal.getsignal(signal.SIGINT)
    flags = {"logger": (name,), "project_name": "mine", "experiment_name": "run"}
    run = make_run(tmp_path, **flags)
    assert signal.getsignal(signal.SIGINT) is handler
    run.log(0, {SCORE: 0.0})
    run.log(1, {SCORE: 0.5, "actor/entropy": float("nan")})
    run.log_validation({validations.STEP: 0, ACCURACY: 0.25}, version=0, at_step=1, chooses_best=True)
    run.log_generations(0, ROWS, shown=1)
    run.finish(None)
    run = resume(run, tmp_path, 1, **flags)
    run.log(2, {SCORE: 1.0})
    run.finish(None)
    assert signal.getsignal(signal.SIGINT) is handler
    found = READ[name](run.dir)
    if found is not None:
        assert found[SCORE] == [(0, 0.0), (1, 0.5), (2, 1.0)] and found[ACCURACY] == [(0, 0.25)]


@pytest.mark.parametrize("name", ["mlflow", "swanlab", "trackio"])
def test_a_logger_that_is_not_installed_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"--logger {name}: .* pip install {name}"):
        make_run(tmp_path, logger=(name,))

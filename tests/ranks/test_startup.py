"""A run prints its first line before the slow imports."""

import gc
import os
import subprocess
import sys

import pytest
from helpers import ROOT

from rl.ranks import startup


@pytest.fixture
def without_torch(tmp_path):
    """Runs a script whose first import of torch ends it, without the garbage collector; returns its stdout."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import gc, os; os._exit(1 if gc.isenabled() else 7)\n")

    def run(script, *flags, stdout=subprocess.PIPE, **env):
        # -P and PYTHONPATH: the stand-in goes before what is installed
        command = [sys.executable, str(ROOT / script), *flags]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}", **env}
        done = subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == 7, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("script", ["train_sync.py", "train_one_step_off.py", "train_async.py"])
def test_the_first_rank_says_what_runs_before_torch_is_imported(without_torch, script):
    assert without_torch(script) == f"{script}: importing torch and transformers\n"
    first = without_torch(script, RANK="0", WORLD_SIZE="4")
    assert first == f"{script} on 4 ranks: importing torch and transformers\n"
    assert without_torch(script, RANK="1", WORLD_SIZE="4") == ""
    assert without_torch(script, "--help") == ""


def test_a_first_line_that_cannot_be_written_stops_nothing(without_torch):
    with open("/dev/full", "w") as full:
        without_torch("train_sync.py", stdout=full)


def test_a_script_may_have_any_name(monkeypatch, capfdbinary):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", [os.fsdecode(b"/home/runs/\xe9t\xe9.py")])
    startup.begin()
    gc.enable()
    assert capfdbinary.readouterr().out == b"\xe9t\xe9.py: importing torch and transformers\n"

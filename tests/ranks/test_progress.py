"""Long work before the first step reports progress, also without a terminal."""

import re
import subprocess
import sys
import threading

import pytest
from helpers import ROOT

from examples.demo import sums as demo
from rl.ranks import progress


@pytest.fixture
def no_terminal(monkeypatch):
    """Without a terminal, every line that the helper could print is due at once."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    monkeypatch.setattr(progress, "SECONDS", 0.0)


def test_work_of_known_length_says_how_much_is_done(no_terminal, capsys):
    assert list(progress.track([5, 6, 7], "measuring prompts")) == [5, 6, 7]
    assert re.findall(r"measuring prompts: (\d) of 3, \d+ s\n", capsys.readouterr().out) == ["0", "1", "2"]


def test_a_quick_run_says_nothing_and_so_do_other_ranks(no_terminal, capsys, monkeypatch):
    assert list(progress.track([5, 6], "x", show=False)) == [5, 6]
    with progress.waiting("x", show=False):
        pass
    monkeypatch.setattr(progress, "SECONDS", 1e6)
    assert list(progress.track([5, 6], "x")) == [5, 6]
    with progress.waiting("x"):
        pass
    assert capsys.readouterr().out == ""


def test_work_of_unknown_length_reports_until_it_ends_or_fails(monkeypatch, capsys):
    said, before = threading.Event(), threading.active_count()
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    monkeypatch.setattr(progress, "print", lambda text, flush: (said.set(), print(text)), raising=False)
    with pytest.raises(RuntimeError), progress.waiting("loading the model"):
        assert said.wait(30)
        raise RuntimeError
    assert re.match(r"loading the model: \d+ s\n", capsys.readouterr().out)
    assert threading.active_count() == before


def test_making_the_demo_model_is_not_silent(no_terminal, capsys):
    demo._teach(demo.build_model(18), demo.build_tokenizer(), 1, 1, 1)
    lines = capsys.readouterr().out.splitlines()
    phases = ("right sums", "right sums, settling", "wrong sums")
    assert lines == [f"making the demo model (once): {phase}: 0 of 1, 0 s" for phase in phases]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_who_closes_the_output_loses_it_alone(closed):
    """Python then has no sys.stdout at all."""
    code = "from rl.record.console import *; from rl.ranks.streams import outlive_output; outlive_output(); "
    code += " ConsoleLog(1).say('x'); print('y', file=sys.stderr); sys.exit(7)"
    command = ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, code]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == 7

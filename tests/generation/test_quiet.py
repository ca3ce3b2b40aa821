"""The startup output of an engine's native code is hidden, but nothing important is lost."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

from rl.generation.vllm import quiet


@pytest.fixture(autouse=True)
def fresh_console(monkeypatch):
    monkeypatch.delenv("RL_ENGINE_LOG", raising=False)


def test_native_lines_are_kept_back_and_pythons_are_not(capfd):
    with quiet.native_stderr_kept_back():
        os.write(2, b"NUMA binding\n")
        subprocess.run("echo a child too >&2", shell=True, check=True)
        print("the watchdog's report", file=sys.stderr)
    os.write(2, b"later\n")
    print("and later still", file=sys.stderr)
    assert capfd.readouterr().err == "the watchdog's report\nlater\nand later still\n"


def test_all_of_it_is_written_where_the_start_fails(capfd):
    with pytest.raises(ValueError), quiet.native_stderr_kept_back():
        os.write(2, b"the library's reason\n")
        raise ValueError
    assert capfd.readouterr().err == "the library's reason\n"


def test_a_variable_lets_it_through(capfd, monkeypatch):
    monkeypatch.setenv("RL_ENGINE_LOG", "1")
    with quiet.native_stderr_kept_back():
        os.write(2, b"NUMA binding\n")
    assert capfd.readouterr().err == "NUMA binding\n"


def test_a_crash_inside_still_shows_where_it_was():
    code = """
import faulthandler, os, signal
faulthandler.enable()
from rl.generation.vllm.quiet import native_stderr_kept_back
with native_stderr_kept_back():
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode < 0 and "Fatal Python error" in done.stderr and "line 6" in done.stderr

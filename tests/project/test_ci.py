"""How CI reruns failed tests (.ci/rerun)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

PASSING = "def test_passes(): pass\n"
FAILING = "def test_fails(): assert False\n"
FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", ["a b", "c - d"])
def test_is_flaky(name, request):
    mark = request.config.rootpath / name
    seen = mark.exists()
    mark.touch()
    assert seen
"""
CRASHING = """
import os

def test_ends_the_process(): os._exit(9)
"""
NOT_ALONE = """
import os
import pytest

def test_needs_its_worker():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("alone")
    assert False
"""
CLOSING = re.compile(r"^=+ (.*) in [\d.]+s.* =+$", re.M)  # pytest's last line


def rerun(tree: Path, files: dict[str, str], *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code and the console of .ci/rerun in a tree of these tests, of whose ini file a part is as this project's."""
    (tree / "pytest.ini").write_text('[pytest]\naddopts = -ra -m "not slow"\nmarkers = slow: x\n')
    for name, text in files.items():
        (tree / f"test_{name}.py").write_text(text)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    plain |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}  # the others cost a second a process
    command = [sys.executable, ROOT / ".ci" / "rerun", *arguments]
    done = subprocess.run(command, cwd=tree, env=plain | environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def said(word: str, console: str) -> list[str]:
    return re.findall(rf"^{word}: (.*)$", console, re.M)


def both(file: str) -> list[str]:
    return [f"{file}.py::test_is_flaky[a b]", f"{file}.py::test_is_flaky[c - d]"]


RERUNS = {  # tests, arguments, exit code, flaky tests, tests that failed twice, what pytest's runs end with
    "one fails twice": (
        {"one": PASSING, "two": FLAKY, "three": FAILING}, [], 1,
        both("test_two"), ["test_three.py::test_fails"], ["3 failed, 1 passed", "1 failed, 2 passed"],
    ),
    "the same, with workers": (
        {"one": PASSING, "two": FLAKY}, ["-n", "2"], 0, both("test_two"), [], ["2 failed, 1 passed", "2 passed"],
    ),
    "cannot be collected": ({"one": "import nothing_of_this_name\n", "two": PASSING}, [], 2, [], [], ["1 error"]),
    "a crash that comes again without workers": (
        {"one": CRASHING, "two": PASSING}, ["-n", "2"], 9, [], ["test_one.py::test_ends_the_process"], ["1 failed, 1 passed"],
    ),
    "skipped the second time": (
        {"one": NOT_ALONE}, ["-n", "2"], 1, [], ["test_one.py::test_needs_its_worker"], ["1 failed", "1 skipped"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [case if n == 0 else pytest.param(case, marks=pytest.mark.slow) for n, case in enumerate(RERUNS)]
)
def test_what_is_run_again_and_what_counts(tmp_path, case):
    files, arguments, code, flaky, failed, closings = RERUNS[case]
    ended, console = rerun(tmp_path, files, *arguments)
    assert (ended, said("flaky", console), said("failed twice", console)) == (code, flaky, failed), console
    assert CLOSING.findall(console) == closings

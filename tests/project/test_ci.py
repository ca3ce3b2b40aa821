"""How CI reruns failed tests (.ci/rerun), and how many processes run tests (conftest.py)."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, demo_trained_by

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
SLOW = """
import pytest

pytestmark = pytest.mark.slow
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


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_what_passes_the_second_time_is_flaky_and_no_failure(tmp_path, workers):
    code, console = rerun(tmp_path, {"one": PASSING, "two": FLAKY}, "-n", workers)
    assert code == 0, console
    assert said("flaky", console) == ["test_two.py::test_is_flaky[a b]", "test_two.py::test_is_flaky[c - d]"]
    assert CLOSING.findall(console) == ["2 failed, 1 passed", "2 passed"], "the last one reads as a pass"


def test_what_fails_twice_has_failed(tmp_path):
    code, console = rerun(tmp_path, {"one": PASSING, "two": FLAKY, "three": FAILING})
    assert code == 1
    assert len(said("flaky", console)) == 2 and said("failed twice", console) == ["test_three.py::test_fails"]
    assert CLOSING.findall(console)[-1] == "1 failed, 2 passed"


def test_a_crash_among_the_repeated_keeps_what_has_passed(tmp_path):
    """As when pytest cannot print a failure: what has passed before it is flaky all the same, the rest has failed."""
    crash = """
def pytest_configure(config):
    global again
    again = config.option.lf

def pytest_runtest_logreport(report):
    if again and report.failed:
        raise RuntimeError("this failure cannot be reported")
"""
    (tmp_path / "conftest.py").write_text(crash)
    code, console = rerun(tmp_path, {"one": FLAKY.replace('["a b", "c - d"]', '["a b"]'), "two": FAILING}, "-q")
    assert code != 0 and "INTERNALERROR" in console
    assert said("flaky", console) == ["test_one.py::test_is_flaky[a b]"]
    assert said("failed twice", console) == ["test_two.py::test_fails"]


def test_nothing_is_run_again_where_all_pass(tmp_path):
    code, console = rerun(tmp_path, {"one": PASSING})
    assert (code, CLOSING.findall(console)) == (0, ["1 passed"])


def test_the_slow_ones_are_rerun_among_themselves(tmp_path):
    files = {"slow": SLOW + FLAKY, "one": FAILING}
    code, console = rerun(tmp_path, files, "-m", "slow")
    assert code == 0 and len(said("flaky", console)) == 2, console


@pytest.mark.parametrize(
    ("files", "code"),
    [({}, 5), ({"one": SLOW + PASSING}, 5), ({"one": "import nothing_of_this_name\n", "two": PASSING}, 2)],
    ids=["no file", "none chosen", "cannot be collected"],
)
def test_no_test_or_no_collection_is_a_failure(tmp_path, files, code):
    ended, console = rerun(tmp_path, files)
    assert ended == code and len(CLOSING.findall(console)) == 1, console


def test_a_crash_is_a_failure(tmp_path):
    assert rerun(tmp_path, {"one": CRASHING})[0] == 9


@pytest.mark.slow
def test_a_crash_that_comes_again_without_workers_is_a_failure(tmp_path):
    """The first crash ends only a worker."""
    code, console = rerun(tmp_path, {"one": CRASHING, "two": PASSING}, "-n", "2")
    assert code == 9 and said("failed twice", console) == ["test_one.py::test_ends_the_process"], console


@pytest.mark.slow
def test_what_is_skipped_the_second_time_has_failed(tmp_path):
    code, console = rerun(tmp_path, {"one": NOT_ALONE}, "-n", "2")
    assert code == 1 and said("failed twice", console) == ["test_one.py::test_needs_its_worker"], console


@pytest.mark.slow
def test_the_end_of_the_time_is_a_failure(tmp_path):
    assert rerun(tmp_path, {"one": PASSING}, CI_DEADLINE="1")[0] == 124
    soon = f"import os, time\n\n\ndef test_is_long():\n    open({str(tmp_path / 'begun')!r}, 'w')\n    time.sleep(600)\n"
    deadline = subprocess.run(["date", "-d", "6 seconds", "+%s"], capture_output=True, text=True, check=True).stdout.strip()
    code, _ = rerun(tmp_path, {"one": soon}, CI_DEADLINE=deadline)
    assert code == 124


def test_ci_reruns_both_kinds_of_tests():
    text = (ROOT / ".ci" / "run").read_text()
    assert '\npytest() { python .ci/rerun "$@"; }\n' in text, "so README's command, and the slow tests behind it, go through it"
    assert text.index("pytest() {") < text.index('&& pytest && pytest -m "runs or slow" || exit 1')


CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time"}


def test_no_test_is_about_how_long_something_takes():
    """A busy machine has other times: benchmarks/ measures them. To wait until a deadline, and to fail because an event did not
    happen by then, is another matter."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                differences = [
                    part for part in ast.walk(node.test) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)
                ]
                calls = [call.func for part in differences for call in ast.walk(part) if isinstance(call, ast.Call)]
                read = [call for call in calls if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "time"]
                assert not any(call.attr in CLOCKS for call in read), f"{path.name}:{node.lineno} {ast.unparse(node)}"


# ------------------------------------------------------------------------------------------------------- conftest.py


WORKERS = [  # arguments of pytest, the number of its workers
    ([], 3),
    (["tests"], 3),
    (["-k", "ring"], 3),
    (["tests/losses/test_losses.py"], 0),
    (["tests/losses/test_losses.py::test_it_works_alone_in_an_empty_directory"], 0),
    (["tests/losses/test_losses.py", "-n", "2"], 2),
    (["-n", "0"], 0),
]
SHOW = """
import json
import sys

import _pytest.config

for arguments in json.loads(sys.argv[1]):
    config = _pytest.config._prepareconfig(["-p", "no:cacheprovider", *arguments])
    import conftest

    conftest.pytest_cmdline_main(config)
    print(config.option.numprocesses)
"""


@pytest.mark.slow
def test_only_whole_runs_have_workers():
    unset = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-c", SHOW, json.dumps([arguments for arguments, _ in WORKERS])]
    done = subprocess.run(
        command, cwd=ROOT, env=unset | {"PYTHONPATH": "tests:tests/tools:."}, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [str(workers) for _, workers in WORKERS], done.stderr


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["train_sync.py", "--lr", "1e-5"], "demo"),
        (["/elsewhere/copy.py", "--model", "demo-vl"], "demo-vl"),
        (["train_async.py", "--model=demo-moe"], "demo-moe"),
        (["train_async.py", "--model", "/a/directory"], None),
        (["-m", "tools.from_verl"], None),
    ],
)
def test_the_demo_that_a_script_trains(arguments, name):
    assert demo_trained_by(arguments) == name

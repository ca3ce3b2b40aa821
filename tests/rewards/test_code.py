"""Programs as answers: found in a response, run on a row's tests, compared as verl's prime_code does, and not to be forged."""

import json
import sys

import numpy as np
import pytest
from helpers import cpu_limit
from test_sandbox import works  # noqa: F401 skips where the system has no sandbox
from test_scoring import FOREVER, drain

from program_grader import extract, grade, sandbox, verdict
from program_grader.cases import read_cases, same_text, same_value
from rl.rewards.pool import RewardArgs, ScoringPool
from user_processes.files import import_file
from user_processes.programs import Programs

pytestmark = pytest.mark.timeout(300)
DOUBLE = {"inputs": ["1\n", "2\n", "30\n", "-4\n"], "outputs": ["2\n", "4\n", "60\n", "-8\n"]}


def fenced(program: str) -> str:
    return f"Doubling is addition.\n```python\n{program}\n```\nThat is all."


def graded(program: str, truth=DOUBLE, in_all: float = FOREVER) -> dict:
    return grade(fenced(program), truth, in_all)


def failure(result: dict) -> str | None:
    return next(
        (name.removeprefix("failed_") for name, failed in result.items() if name.startswith("failed_") and failed), None
    )


@pytest.mark.parametrize(
    ("program", "score", "passed", "failed"),
    [
        ("print(2 * int(input()))", 1.0, 4, None),
        ("import sys\nprint(2 * int(sys.stdin.read()), end='')", 1.0, 4, None),
        ("n = int(open(0).readline())\nprint(f'{n + n}  \\n\\n')", 1.0, 4, None),
        ("n = int(open('/dev/stdin').read())\nprint(float(2 * n))", 1.0, 4, None),
        ("def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()", 1.0, 4, None),
        ("import threading\nthreading.Thread(target=lambda: print(2 * int(input()))).start()", 1.0, 4, None),
        ("n = int(input())\nprint(2 * n)\nexit()", 1.0, 4, None),
        ("print(reduce(add, [int(input())] * 2))", 1.0, 4, None),  # names that contests' programs take for granted
        ("n = int(input())\nprint(2 * n if n < 5 else 0)", 0.75, 3, "wrong"),
        ("n = int(input())\nprint(2 * n)\nassert n != 2", 0.75, 3, "error"),
        ("n = int(input())\nprint(2 * n)\nexit(n == 30)", 0.75, 3, "error"),
        ("n = int(input())\nx = [0] * (10**9 if n < 0 else 1)\nprint(2 * n)", 0.75, 3, "memory"),
        ("n = int(input())\nwhile n == 1: pass\nprint(2 * n)", 0.75, 3, "timeout"),
        ("n = int(input())\nwhile n == 1: print('x' * 10**6)\nprint(2 * n)", 0.75, 3, "output"),
        ("print(2 * int(input())", 0.0, 0, "syntax"),
        ("", 0.0, 0, "syntax"),
    ],
)
def test_a_program_has_the_fraction_of_the_tests_that_it_passes(program, score, passed, failed, monkeypatch):
    monkeypatch.setattr(verdict, "CPU_SECONDS", 1 if failed == "timeout" else 20)
    found = graded(program)
    assert (found["score"], found["tests_passed"], failure(found)) == (score, passed, failed)
    assert found["acc"] == float(score == 1)


def test_the_first_tests_and_the_time_of_all():
    many = {"inputs": ["1"] * 12, "outputs": ["2"] * 9 + ["x"] * 3}
    found = graded("print(2)", many)
    assert (found["score"], found["acc"], found["tests_run"], found["tests_passed"]) == (0.9, 0, 10, 9)
    slow = graded("import time\ntime.sleep(60)", in_all=1.0)
    assert (slow["score"], slow["tests_run"], failure(slow)) == (0, 1, "timeout")


ADD = "def add(a, b):\n    return a + b"
FORKS = "import os\ndef add(a, b):\n    pid = os.fork()\n    if pid: os.waitpid(pid, 0)\n    return a + b"
SOLUTION = "class Solution:\n    def add(self, a: List[int], b):\n        return a + b"


@pytest.mark.parametrize(
    ("truth", "program", "score"),
    [
        ({"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}, ADD, 1),  # verl's prime_code
        ({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [[1, 2]]]}, SOLUTION, 1),  # APPS, TACO
        ({"input_output": '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}'}, ADD, 1),
        ({"fn_name": "add", "inputs": [[0.1, 0.2]], "outputs": [0.3]}, ADD, 1),
        ({"fn_name": "add", "inputs": [[[1], [2]]], "outputs": [[1, 2]]}, "def add(a, b): return tuple(a + b)", 1),
        ({"fn_name": "at", "inputs": ['{"1": 5}'], "outputs": ["5"]}, "def at(d): return d[1]", 1),  # its keys were numbers
        ({"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, "def plus(a, b): return a + b", 0),
        ({"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, "def add(a, b): print(a + b)", 0),
        ({"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, "def add(a, b): return {a, b}", 0),  # no JSON
        ([{"input": "4", "output": "8", "testtype": "stdin"}], "print(2 * int(input()))", 1),  # LiveCodeBench
        ([{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}], SOLUTION, 1),
        ({"inputs": [["1", "2"]], "outputs": [["2", "1"]]}, "a, b = input(), input()\nprint(b)\nprint(a)", 1),  # lines
        (["assert add(1, 2) == 3", "assert add(1, 2) == 4"], ADD, 0.5),  # MBPP
        ({"test_list": ["assert add(1, 2) == three"], "test_setup_code": "three = 3"}, ADD, 1),
        ({"assert_case": ["assert add(1, 2) == 3", ""], "inputs": ["", ""], "outputs": ["", ""]}, ADD, 1),
        ({"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}, ADD, 1),  # HumanEval
        (["assert add(1, 2) == 3"], "import os\nos._exit(0)", 0),
        ({"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]}, FORKS, 1),  # and only the parent reports
    ],
)
def test_layouts_of_tests(truth, program, score):
    assert graded(program, truth)["score"] == graded(program, json.dumps(truth))["score"] == score


@pytest.mark.parametrize(
    "truth", ["5", "no JSON", "{}", '{"inputs": ["1"], "outputs": []}', "[]", "[1]", '[{"input": "1"}]', '{"fn_name": "f"}']
)
def test_a_ground_truth_without_tests_is_no_fault_of_the_response(truth):
    with pytest.raises(ValueError):
        read_cases(truth)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1 2  \n\n 3 \n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("YES", "Yes", False),
        ("3.0", "3", True),
        ("3", "3.0", True),
        ("0.333333", "0.3333333333", True),
        ("0.3333", "0.3333333333", False),
        ("2.999999999", "3", False),  # verl's takes it
        ("1.00001 x", "1.00002 x", True),
        ("010", "10", False),
        ("nan", "nan", True),
        ("1e400", "1e401", False),
        (str(10**400), str(10**400 + 1), False),
        ("", "", True),
        ("", "0", False),
        ("0.000000001", "0", False),
    ],
)
def test_texts_are_compared_as_in_contests(output, expected, same):
    assert same_text(output, expected) is same


def test_values_are_compared_as_verl_does():
    """Tuples are lists, an expected list may hold the value, fractions may be 1e-5 off."""
    assert same_value([1, [2]], [1, [2]]) and same_value([1, 2], [[1, 2]]) and same_value(0.3, 0.1 + 0.2)
    assert same_value({"1": [0.5]}, {"1": [0.5000001]}) and same_value(None, None) and same_value("a", "a")
    assert not same_value([1, 2], [2, 1]) and not same_value(1, "1") and not same_value([], [[1]])
    assert not same_value(10**400, 0.5) and not same_value(0.5, 10**400)
    assert not same_value({"1": 1}, {"1": 1, "2": 2}) and not same_value(float("nan"), float("nan"))


def test_the_last_fenced_block_is_the_program():
    assert extract("```python\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert extract("```python\na\n```\nIt prints:\n```\n5\n```") == "a\n"  # of those that are marked, if any is
    assert extract("```\na\n```\n```\nb\n```") == "b\n"
    assert extract("```cpp\na\n```\n") == "a\n"
    assert extract("<think>```python\nb\n```</think>```python\na\n```") == "a\n"
    assert extract("```python\na\nb") == "a\nb"  # cut by the length
    assert extract("print(1)") == "print(1)"
    assert extract("  ```Python3\n  a\n  ```") == "  a\n"
    assert extract("<think>```python\na\n```</think>") == ""


@pytest.mark.parametrize(
    "unit", ["`", "```", "```\n", "```a", "a", " ", "\n ", "\t```", "```python\n", "</think>", "```python"]
)
def test_degenerate_responses_cost_next_to_nothing(unit):
    with cpu_limit(5):
        for text in (unit * 40_000, "```" + unit * 40_000, "```python\n" + unit * 40_000):
            extract(text)


FORGERIES = {
    "exit": "import os\nos._exit(0)",
    "descriptors": """
import os
for fd in range(256):
    for text in (b'{"value": 4}', b'{"passed": true}', b'{"output": "4", "ended": "ok", "used": false}', b'ok'):
        try: os.write(fd, text + b'\\n')
        except OSError: pass""",
    "frames": """
import gc, sys
frame, names = sys._getframe(), []
while frame:
    names += map(repr, [*frame.f_locals.values(), *frame.f_globals.values()])
    frame = frame.f_back
names += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (dict, str, list, tuple))]
print(4 if any('8642' in name for name in names) else 0)
print('\\n'.join(names)[:100000])""",
    "memory": """
import re
for line in open('/proc/self/maps'):
    start, end = (int(part, 16) for part in line.split()[0].split('-'))
    with open('/proc/self/mem', 'rb', 0) as memory:
        try: memory.seek(start); data = memory.read(end - start)
        except (OSError, OverflowError, ValueError): continue
        if (b'86' + b'42') in data: print(8642)""",
    "two reports": "import os\nchild = os.fork()\nif child: os.waitpid(child, 0)\nprint(1 if child else 8642)",
    "comparison": "class Same(str):\n    def __eq__(self, other): return True\nprint(Same('x'))",
    "builtins": "import builtins, json\nbuiltins.print = lambda *a: 1\njson.dumps = lambda x: '8642'",
    "sandbox": "import os, signal\nfor n in range(1, 32): os.kill(1, n)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_cannot_be_forged(name):
    """What is expected never enters the sandbox, and the grader believes outputs alone; a right program after it is right."""
    truth = {"inputs": ["4321\n"], "outputs": ["8642"]}
    assert graded(FORGERIES[name], truth)["score"] == 0
    of_function = {"fn_name": "double", "inputs": ["4321"], "outputs": ["8642"]}
    assert graded(FORGERIES[name] + "\ndef double(n): return [n, n]", of_function)["score"] == 0
    assert graded("print(2 * int(input()))", truth)["score"] == 1


def test_the_sandbox_stays_warm_and_is_replaced_when_it_was_used():
    graded("print(1)")
    warm = sandbox._own[0]
    graded("print(1)")
    assert sandbox._own[0] is warm and warm.usable
    found = graded("open('/tmp/x', 'a').write('x')\nprint(len(open('/tmp/x').read()) * 2 * int(input()))")
    assert found["score"] == 1 and not warm.usable


def test_the_pool_scores_programs_in_its_processes():
    """Both ways to the grader; a truth without tests is counted and named, the response is not to blame for it."""
    truth = json.dumps(DOUBLE)
    flags = dict(reward_timeout=FOREVER)
    texts = {"right": "print(2 * int(input()))", "partly": "print(abs(2 * int(input())))", "wrong": "print(1)"}
    for args, source in ((RewardArgs(reward="code", **flags), "my/data"), (RewardArgs(**flags), "taco")):
        with ScoringPool(args) as pool:
            for name, program in texts.items():
                pool.submit(name, source, fenced(program), truth)
            pool.submit("bad data", source, fenced("print(1)"), "5")
            pool.submit("as in parquet", source, fenced(texts["right"]), {name: np.array(of) for name, of in DOUBLE.items()})
            found = drain(pool)
            assert {key: score.score for key, score in found.items()} == {
                "right": 1.0,
                "partly": 0.75,
                "wrong": 0.0,
                "bad data": None,
                "as in parquet": 1.0,
            }
            assert found["partly"].extra["tests_passed"] == 3 and found["partly"].extra["failed_wrong"] == 1
            assert pool.events == {"error": 1} and "the ground truth 5 has no tests" in pool.last_message["error"]


def test_the_python_tool_answers_the_model(monkeypatch):
    from examples import python_tool

    monkeypatch.setattr(sys, "path", [*sys.path])  # importing a file by its path adds its folder
    tool = import_file(python_tool.__file__, "python_tool_of_the_test").python
    programs = Programs([tool], are_tools=True)
    assert [schema["function"]["name"] for schema in programs.schemas()] == ["python"]
    call = lambda code: {"name": "python", "arguments": {"code": code}}  # noqa: E731
    messages, reward, done = programs.new().step({"calls": [call("print(6 * 7)"), call("1 / 0"), call("print('x' * 9999)")]})
    texts = [message["content"] for message in messages]
    assert texts[0] == "42\n" and "ZeroDivisionError" in texts[1] and "sandbox" not in texts[1]
    assert len(texts[2]) < 4100 and texts[2].endswith("... (cut)") and (reward, done) == (None, False)

"""The grader of programs, which runs a response's program on a row's tests, in a sandbox.

Expected values stay in this process: the sandbox gets inputs and returns outputs, so no trick inside it passes a test. Asserts
are the exception: they run next to the program, which may tamper with them.
"""

import re
import time
from typing import Any

from program_grader import sandbox
from program_grader.cases import Case, read_cases

KINDS = ("syntax", "error", "timeout", "memory", "output", "wrong")  # of failure
CPU_SECONDS = 5  # of a test
MEMORY_GB = 1.0  # of a program with all its processes, files and sockets
TESTS = 10  # the first ones of a row
BLOCK = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.MULTILINE | re.DOTALL)


def extract(response: str) -> str:
    """Return the last Python block in ``` fences; without one the last block in fences; without any, everything after
    </think>."""
    answer = response.rpartition("</think>")[2]
    blocks = BLOCK.findall(answer)
    marked = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    return (marked or [code for _, code in blocks] or [answer])[-1]


def grade(response: str, truth: Any, seconds_in_all: float = 60.0) -> dict[str, float]:
    """Return score, the fraction of the tests that pass; acc, 1 if all pass, else 0; tests_run and tests_passed; and
    failed_<kind>, 1 for the kind of the first failure. seconds_in_all: the time for all tests; those not run by then have
    failed. Raise ValueError for a ground truth that cannot be read, and NoSandbox if there is no sandbox."""
    program = extract(response)
    cases = read_cases(truth)[:TESTS] if program.strip() else []
    kinds = []
    until = time.monotonic() + seconds_in_all
    for case in cases:
        if (left := until - time.monotonic()) <= 0:
            break
        kinds.append(_kind(program, case, left))
        if kinds[-1] == "syntax":  # it fails all tests
            break
    return _result(kinds, len(cases))


def _kind(program: str, case: Case, left: float) -> str:
    """Return how a test ended: "ok" or one of KINDS. left: the seconds left for all tests."""
    seconds = min(2 * CPU_SECONDS, left)
    ran = sandbox.run(program, **case.task, seconds=seconds, cpu=CPU_SECONDS, memory_gb=MEMORY_GB, prelude=True)
    return ran.ended if ran.ended != "ok" else "ok" if case.passes(ran.output) else "wrong"


def _result(kinds: list[str], tests: int) -> dict[str, float]:
    passed = kinds.count("ok")
    right = float(passed == tests > 0)
    failed = next((kind for kind in kinds if kind != "ok"), "" if right else "timeout" if tests else "syntax")
    counts = {"acc": right, "tests_run": len(kinds), "tests_passed": passed}
    return {"score": passed / max(1, tests)} | counts | {f"failed_{kind}": float(kind == failed) for kind in KINDS}

"""The grader of programs, which runs a response's program on a row's tests, in a sandbox.

Expected values stay in this process: the sandbox gets inputs and returns outputs, so no trick inside it passes a test. Asserts
are the exception: they run next to the program, which may tamper with them.
"""

import math
import re
import time
from typing import Any

from rl.rewards.programs import sandbox
from rl.rewards.programs.cases import Case, read_cases

KINDS = ("syntax", "error", "timeout", "memory", "output", "wrong")  # of failure
SPARE = 0.1  # the fraction of --reward-timeout that programs do not get
BLOCK = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.MULTILINE | re.DOTALL)


def extract(response: str) -> str:
    """Return the last Python block in ``` fences; without one the last block in fences; without any, everything after
    </think>."""
    answer = response.rpartition("</think>")[2]
    blocks = BLOCK.findall(answer)
    marked = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    return (marked or [code for _, code in blocks] or [answer])[-1]


def grade(response: str, truth: Any, limits: dict) -> dict[str, float]:
    """Return score, by --code-score; acc, 1 if all tests pass, else 0; tests_run and tests_passed; and failed_<kind>, 1 for the
    kind of the first failure. limits: as CodeArgs.limits returns them. Raise ValueError for a ground truth that cannot be read,
    and UserError if there is no sandbox."""
    program = extract(response)
    cases = []
    kinds = []
    if program.strip():
        cases = read_cases(truth)
        cases = cases[: limits["tests"] or len(cases)]
    until = time.monotonic() + (1 - SPARE) * limits["in_all"]
    for case in cases:
        if (left := until - time.monotonic()) <= 0:
            break
        kinds.append(_kind(program, case, left, limits))
        if kinds[-1] == "syntax" or (kinds[-1] != "ok" and limits["all"]):  # a syntax error fails all tests
            break
    return _result(kinds, len(cases), limits)


def _kind(program: str, case: Case, left: float, limits: dict) -> str:
    """Return how a test ended: "ok" or one of KINDS. left: the seconds left for all tests."""
    ran = sandbox.run(
        program,
        **case.task,
        seconds=min(2 * limits["seconds"], left),
        cpu=math.ceil(limits["seconds"]),
        memory_gb=limits["memory_gb"],
        prelude=True,
    )
    return ran.ended if ran.ended != "ok" else "ok" if case.passes(ran.output) else "wrong"


def _result(kinds: list[str], tests: int, limits: dict) -> dict[str, float]:
    passed = kinds.count("ok")
    right = float(passed == tests > 0)
    failed = next((kind for kind in kinds if kind != "ok"), "" if right else "timeout" if tests else "syntax")
    score = right if limits["all"] else passed / max(1, tests)
    counts = {"acc": right, "tests_run": len(kinds), "tests_passed": passed}
    return {"score": score} | counts | {f"failed_{kind}": float(kind == failed) for kind in KINDS}

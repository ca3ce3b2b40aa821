"""What a test of a program costs: in the warm sandbox, with a sandbox for each, and without any.

    python benchmarks/rewards/sandbox.py        # writes benchmarks/results/sandbox.{json,md}

The three take turns. CPU time is that of all processes, waited for at the end of each round.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import RESULTS, over, setting, table, words, write

from program_grader import Sandbox

PROGRAM = "n = int(input())\nprint(sum(i * i for i in range(n)))"


@dataclass
class Args:
    rounds: int = 5
    tests: int = 200
    """In a round, in the warm sandbox; a tenth of them of the others."""
    out: Path = RESULTS


def warm(tests: int) -> None:
    sandbox = Sandbox()
    for _ in range(tests):
        assert sandbox.run(PROGRAM, stdin="10\n", prelude=True).output == "285\n"
    end(sandbox)


def one_each(tests: int) -> None:
    for _ in range(tests):
        warm(1)


def bare(tests: int) -> None:
    for _ in range(tests):
        done = subprocess.run([sys.executable, "-I", "-S", "-c", PROGRAM], input=b"10\n", capture_output=True)
        assert done.stdout == b"285\n"


def end(sandbox: Sandbox) -> None:
    """Has it end by itself, so that its CPU time counts."""
    sandbox._process.stdin.close()
    sandbox._process.wait()


def cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measured(how: Callable[[int], None], tests: int) -> dict:
    began, used = time.perf_counter(), cpu()
    how(tests)
    return {"ms": 1e3 * (time.perf_counter() - began) / tests, "cpu_ms": 1e3 * (cpu() - used) / tests}


def main(args: Args) -> None:
    few = max(1, args.tests // 10)
    sides = {"warm sandbox": (warm, args.tests), "a sandbox each": (one_each, few), "Python alone, no sandbox": (bare, few)}
    runs = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side, (how, tests) in sides.items():
            runs[side].append(measured(how, tests))
    rows = [[side, *(over([one[name] for one in its], ".1f") for name in ("ms", "cpu_ms"))] for side, its in runs.items()]
    under = setting()
    text = f"A test of a short program:\n\n{table(['', 'ms', 'CPU ms'], rows)}\n\n{words(under)}."
    write("sandbox", {"setting": under, "args": asdict(args) | {"out": str(args.out)}, "runs": runs}, text, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

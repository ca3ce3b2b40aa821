"""The flags for programs that the model writes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.ranges import MayChange, Range

CODE = "code"  # --reward code, and the name of its grader


@dataclass
class CodeArgs:
    """Programs that the model writes, which are run in a sandbox and tested."""

    code_score: Literal["fraction", "all"] = "fraction"
    """Score of a program: the fraction of its tests that it passes, or 1 if it passes all of them and else 0."""
    code_tests: Annotated[int, Range(at_least=0)] = 10
    """Only the first tests of a row are run, this many at most; 0 runs all."""
    code_timeout: MayChange[Annotated[float, Range(above=0, at_most=86_400)]] = 5.0
    """CPU seconds that a test may take, rounded up to whole ones; it may last twice as long. All tests of a response together
    have --reward-timeout; tests that are not run by then have failed."""
    code_memory_limit_gb: MayChange[Annotated[float, Range(at_least=0.0625, at_most=1_000_000)]] = 1.0
    """Address space of each process of a tested program, in GiB."""

    def limits(self, in_all: float) -> dict:
        """What the grader of programs gets with each response. in_all: seconds that all its tests together may take."""
        own = {"seconds": self.code_timeout, "memory_gb": self.code_memory_limit_gb, "tests": self.code_tests}
        return own | {"all": self.code_score == "all", "in_all": in_all}

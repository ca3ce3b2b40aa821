"""The result of a check, and its command, run in its own session with a time limit; none of its processes stays behind."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from user_processes.child import children, end_with_parent
from user_processes.server import python_path

ROOT = Path(__file__).resolve().parents[2]
GRACE = 20.0  # seconds that torchrun gets to end its ranks
OK, SLOW, WRONG, SKIPPED = "ok", "slow", "WRONG", "skipped"
ATTACH = "attach doctor.json to an issue"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `slow`: works, but costs time; `WRONG`: must be fixed; `skipped`: could not be tried here."""

    check: str
    status: Literal["ok", "slow", "WRONG", "skipped"]
    text: str
    remedy: str = ""
    facts: dict = field(default_factory=dict)  # numbers behind the text, for doctor.json

    def __str__(self) -> str:
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.status:7} {self.check}: {self.text}{remedy}"


@dataclass(frozen=True)
class Outcome:
    """How a command ended. code: None if it ran out of time. output: stdout and stderr together."""

    command: Sequence[str]
    code: int | None
    output: str
    seconds: float

    @property
    def facts(self) -> dict:
        return {"command": self.command, "seconds": self.seconds, "exit_code": self.code, "output": self.output[-6000:]}

    @property
    def reason(self) -> str:
        """The line that explains the failure: the last `error:`, else the last line of a traceback or of the output."""
        if self.code is None:
            return f"it did not end within {self.seconds:.0f} s; its last line was: {self._last_line}"
        errors = [line for line in self.output.splitlines() if line.startswith("error:")]
        return errors[-1].removeprefix("error: ") if errors else self._last_line

    @property
    def _last_line(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        raised = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith(("File", "W", "E"))]
        return (raised or lines or ["(nothing)"])[-1][:300]


def run(command: Sequence[str], timeout: float) -> Outcome:
    """Run the command in the repository's root. Return how it ended, once all of its processes have exited."""
    started = time.monotonic()
    others = children()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": python_path(str(ROOT)), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, others)
        output.seek(0)
        return Outcome(command, code, output.read().decode(errors="replace"), time.monotonic() - started)


def _end(process: subprocess.Popen, others: set[int]) -> None:
    """End the command and everything that it started. others: earlier children of this process, which stay."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    while orphans := children() - others:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

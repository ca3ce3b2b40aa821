"""A scoring process as the rank sees it: rl/scoring.py decides which responses it gets, rl/reward_worker.py runs in it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

REPLY_LIMIT = 1 << 24  # bytes of one answer; more is not a score
QUICK = 0.01  # seconds of a score after which a process is given one more at once
AT_ONCE = 16  # responses that it is given at most


class ScoringProcess:
    """One scoring process in a session of its own, so that what it forks can be killed with it. Its pipes never block."""

    def __init__(self, reward: str | None, memory_gb: float, cpu_seconds: float):
        """reward: path/to/file.py:function; without it a built-in verifier, which each item names."""
        drops, self._drop = os.pipe()  # a read end of its own: what stands in stdin is not seen before it is next
        os.set_blocking(drops, False)
        given = [reward or "", str(memory_gb), str(cpu_seconds), str(os.getpid()), str(drops)]
        command = [sys.executable, "-m", "rl.reward_worker", *given]
        root = str(Path(__file__).resolve().parent.parent)
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "pass_fds": [drops]}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **options)
        os.close(drops)
        os.set_blocking(self.process.stdin.fileno(), False)
        os.set_blocking(self.process.stdout.fileno(), False)
        self.items: deque[tuple[int, Any, str]] = deque()  # (number, key, item): the one it works on, and those behind it
        self.recalled: dict[int, tuple[Any, str]] = {}  # number -> (key, item) of those taken back, until it has dropped them
        self.ready = False  # it has said that it is
        self.quick = 0  # its newest scores that took no longer than QUICK each
        self.started = time.monotonic()  # when it was started, or began its item as far as one knows here
        self._given = 0  # items so far; an answer with a number that is not expected is none of the worker's own
        self._read = b""
        self._unwritten = b""

    @property
    def has_room(self) -> bool:
        return self.ready and not (self._unwritten or self.recalled) and len(self.items) < min(AT_ONCE, 1 + self.quick)

    @property
    def is_idle(self) -> bool:
        return not (self.items or self.recalled)

    def give(self, key: Any, item: str) -> None:
        self._given += 1
        if not self.items:
            self.started = time.monotonic()
        self.items.append((self._given, key, item))
        self._unwritten = f"[{self._given}, {item}]\n".encode()
        self.write()

    def take_back(self) -> list[tuple[Any, str]]:
        """The items that it has not begun, for others. It may have begun the next one when it learns of it."""
        first, *rest = self.items
        self.quick, self.items = 0, deque([first])
        self.recalled = {number: (key, item) for number, key, item in rest}
        with contextlib.suppress(BrokenPipeError):
            os.write(self._drop, b"[%d,%d]" % (first[0] + 1, self._given))
        return list(self.recalled.values())

    def write(self) -> None:
        """Hands over as much of the newest item as the pipe takes now."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self.process.stdin.fileno(), self._unwritten) :]
                if len(self.items) == 1:
                    self.started = time.monotonic()  # a long item goes in pieces: its time begins with the last
        except BlockingIOError:
            pass
        except BrokenPipeError:  # dead: the reader meets the end of its output
            self._unwritten = b""

    def answered(self, seconds: float) -> Any:
        """Its item has been scored in so many seconds; returns the key."""
        self.started, self.quick = time.monotonic(), self.quick + 1 if seconds <= QUICK else 0
        return self.items.popleft()[1]

    def replies(self) -> tuple[list[dict | None], bool]:
        """The answers that have come in, None for one that is none, and whether its output has ended."""
        ended = False
        try:
            while len(self._read) <= REPLY_LIMIT and not ended:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                self._read += data
                ended = not data
        except BlockingIOError:
            pass
        *lines, self._read = self._read.split(b"\n")
        too_long = [None] if len(self._read) > REPLY_LIMIT else []
        return [_reply(line) for line in lines] + too_long, ended

    def register(self, poller: "select.poll") -> None:
        poller.register(self.process.stdout, select.POLLIN)
        if self._unwritten:
            poller.register(self.process.stdin, select.POLLOUT)

    def ending(self) -> tuple[str, str]:
        """The event that its end is, and how it ended."""
        try:
            code = self.process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            return "died", "the scoring process closed its pipe"
        if code == -signal.SIGXCPU:
            return "timeout", "no score within the CPU time of --reward-cpu-limit"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return "died", f"the scoring process {how}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.stdin.close()
        self.process.stdout.close()
        os.close(self._drop)
        self.process.wait()


def _reply(line: bytes) -> dict | None:
    """A worker's line; None if it is not one of its own: the user's function can write to any file descriptor."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return None
    shapes = ({"ready"}, {"failed"}, {"number", "seconds", "value"}, {"number", "seconds", "failed"}, {"number", "dropped"})
    if not isinstance(reply, dict) or reply.keys() not in shapes:
        return None
    numbers = reply.get("number", 0), reply.get("seconds", 0)
    return reply if all(isinstance(x, int | float) for x in numbers) else None

"""A scoring process as a thread of the rank sees it: rl/rewards/pool.py says what it scores, rl/rewards/worker.py runs in
it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from rl import printable
from rl.rewards import descendants

REPLY_LIMIT = 1 << 24  # bytes of one answer; more is not a score
LOOK = 0.1  # seconds after which one who waits asks again how long it may
WROTE = "error", "the reward function wrote to the scoring process's own output"


class Lost(Exception):
    """The process has ended, or what it says is not its own."""

    def __init__(self, event: str, message: str, idle: bool = False):
        """event: one of rl.rewards.pool's EVENTS; message: how it came to it; idle: whether it had nothing to score then."""
        message = printable.one_line(message)
        super().__init__(message)
        self.event = event
        self.message = message
        self.idle = idle


class ScoringProcess:
    """One scoring process, with a guard (rl/rewards/descendants.py) that ends what it has started. It ends with the thread that
    started it."""

    def __init__(self, reward: str | None, memory_gb: float, cpu_seconds: float, passed: Sequence[str] = ()):
        """reward: path/to/file.py:function; without it a built-in verifier, which each item names. passed: --reward-env."""
        command, pipe = ("rl.rewards.worker", reward or "", str(memory_gb), str(cpu_seconds)), subprocess.PIPE
        self.process = descendants.start(*command, passed=passed, stdin=pipe, stdout=pipe, bufsize=0)
        os.set_blocking(self.process.stdin.fileno(), False)  # a long item goes in pieces
        self.asked = 0  # items so far: an answer with another number is none of the process's own
        self._read = b""
        self._unwritten = b""  # of items that were put

    def __enter__(self) -> "ScoringProcess":
        return self

    def __exit__(self, *_) -> None:
        descendants.end(self.process)
        self.process.stdin.close()
        self.process.stdout.close()

    def ask(self, item: str, limit: Callable[[], float]) -> dict:
        """Its answer to the item. limit: the seconds that it may take, which may change. Raises TimeoutError or Lost."""
        if self._read or _is_ready(self.process.stdout, 0):
            if not self._read:
                self._receive(idle=True)
            raise Lost(*WROTE, idle=True)
        self.asked += 1
        unwritten = memoryview(f"[{self.asked}, {item}]\n".encode())
        with contextlib.suppress(BrokenPipeError):  # it has ended: how, its output's end tells
            while unwritten := unwritten[os.write(self.process.stdin.fileno(), unwritten) :]:
                _wait(self.process.stdin, limit, time.monotonic())
        reply = self.answer(limit)
        if reply.get("number") != self.asked:
            raise Lost(*WROTE)
        return reply

    def answer(self, limit: Callable[[], float]) -> dict:
        """What it says next. The first of all is whether it is ready."""
        started = time.monotonic()
        while b"\n" not in self._read:
            _wait(self.process.stdout, limit, started)
            self._receive()
        line, _, self._read = self._read.partition(b"\n")
        return _reply(line)

    def put(self, item: str, seconds: float) -> int:
        """Gives it an item of many that it works on at once, which may take so long. Returns the item's number."""
        self.asked += 1
        self._unwritten += f"[{self.asked}, {item}, {seconds}]\n".encode()
        return self.asked

    def exchange(self, seconds: float) -> list[dict]:
        """Writes as much of the items as it takes, and waits up to so long for answers, in any order. Raises Lost."""
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLIN)
        if self._unwritten:
            poller.register(self.process.stdin, select.POLLOUT)
        ready = {file for file, _ in poller.poll(1000 * seconds)}
        if self.process.stdin.fileno() in ready:
            try:
                self._unwritten = self._unwritten[os.write(self.process.stdin.fileno(), self._unwritten) :]
            except BrokenPipeError:  # it has ended: how, its output's end tells
                self._unwritten = b""
        if self.process.stdout.fileno() in ready:
            self._receive()
        *lines, self._read = self._read.split(b"\n")
        return [_reply(line) for line in lines]

    def _receive(self, idle: bool = False) -> None:
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self._read += data
        if not data:
            raise Lost(*self._ending(), idle)
        if len(self._read) > REPLY_LIMIT:
            raise Lost(*WROTE, idle)

    def _ending(self) -> tuple[str, str]:
        """The event that its end is, and how it ended."""
        try:
            code = descendants.exit_code(self.process, timeout=2)
        except subprocess.TimeoutExpired:
            return "died", "the scoring process closed its pipe"
        if code == -signal.SIGXCPU:
            return "timeout", "no score within the CPU time of --reward-cpu-limit"
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return "died", f"the scoring process {how}"


def _signal_name(number: int) -> str:
    """Python has no names for most of the real-time signals."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    first = signal.SIGRTMIN
    return f"signal {number} (SIGRTMIN+{number - first})" if first <= number <= signal.SIGRTMAX else f"signal {number}"


def _is_ready(pipe, seconds: float) -> bool:
    """Whether the pipe can be read or written, within this many seconds."""
    poller = select.poll()  # unlike select.select it takes any number of open files
    poller.register(pipe, select.POLLOUT if pipe.writable() else select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def _wait(pipe, limit: Callable[[], float], started: float) -> None:
    """Until the pipe is ready. Raises TimeoutError when the limit has passed since the start."""
    while True:
        left = limit() + started - time.monotonic()
        if _is_ready(pipe, min(max(left, 0.0), LOOK)):
            return
        if left <= 0:
            raise TimeoutError


def _reply(line: bytes) -> dict:
    """A worker's line. Raises Lost if it is not one of its own: the user's function can write to any file descriptor."""
    with contextlib.suppress(ValueError, RecursionError):
        reply = json.loads(line)
        shapes = ({"ready"}, {"failed"}, {"number", "value"}, {"number", "failed"}, {"number", "failed", "event"})
        if isinstance(reply, dict) and reply.keys() in shapes:
            return reply
    raise Lost(*WROTE)

"""A scoring process, as seen by its thread in the rank (rl/rewards/lane.py); the process itself runs
rl/rewards/worker.py."""

import contextlib
import json
import os
import select
import subprocess

from rl import printable
from rl.rewards import descendants
from rl.rewards.args import RewardArgs

REPLY_LIMIT = 1 << 24  # bytes of one reply; more is not a score
WROTE = "error", "the reward function wrote to the scoring process's own output"


class Lost(Exception):
    """The loss of a process: it has ended, or its output is not the worker's."""

    def __init__(self, event: str, message: str):
        """event: one of rl/rewards/score.py's EVENTS; message: what happened."""
        super().__init__(printable.one_line(message))
        self.event = event


class ScoringProcess(contextlib.AbstractContextManager):
    """A scoring process, with a guard (rl/rewards/descendants.py) that ends everything the process has started. It ends with
    the thread that started it."""

    def __init__(self, args: RewardArgs, first: bool):
        """first: whether it is the run's first one."""
        arguments = (args.worker_spec(first), str(args.reward_memory_limit_gb), str(args.reward_cpu_limit))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self.process = descendants.start("rl.rewards.worker", *arguments, passed=args.passed_env, **pipes)
        os.set_blocking(self.process.stdin.fileno(), False)  # a long item is written in pieces
        self._count = 0  # items so far; a reply with another number was not written by the worker
        self._unwritten = b""
        self._unread = b""

    def __exit__(self, *_) -> None:
        descendants.end(self.process)
        self.process.stdin.close()
        self.process.stdout.close()

    def put(self, item: str, seconds: float) -> int:
        """Queue an item, which `exchange` will write, and return its number. seconds: the time limit for an async function."""
        self._count += 1
        self._unwritten += f"[{self._count}, {item}, {seconds}]\n".encode()
        return self._count

    def exchange(self, seconds: float) -> list[dict]:
        """Write as much as the process accepts, wait up to `seconds`, and return its replies, in any order. The very first
        reply says that the process is ready, or why it is not. Raise Lost if the process is lost."""
        poller = select.poll()  # unlike select.select it takes any number of open files
        poller.register(self.process.stdout, select.POLLIN)
        if self._unwritten:
            poller.register(self.process.stdin, select.POLLOUT)
        ready = {file for file, _ in poller.poll(1000 * seconds)}
        if self.process.stdin.fileno() in ready:
            try:
                self._unwritten = self._unwritten[os.write(self.process.stdin.fileno(), self._unwritten) :]
            except BrokenPipeError:  # it has ended; `_ending` finds out how
                self._unwritten = b""
        if self.process.stdout.fileno() in ready:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise Lost(*self._ending())
            self._unread += data
            if len(self._unread) > REPLY_LIMIT:
                raise Lost(*WROTE)
        *lines, self._unread = self._unread.split(b"\n")
        return [_reply(line) for line in lines]

    def check_idle(self) -> None:
        """Raise Lost if the process has ended or written something since its last reply."""
        if self.exchange(0) or self._unread:
            raise Lost(*WROTE)

    def _ending(self) -> tuple[str, str]:
        """Return the event for the end of the process, and a message."""
        try:
            code = descendants.exit_code(self.process, timeout=2)
        except subprocess.TimeoutExpired:
            return "died", "the scoring process closed its pipe"
        return descendants.ending(code, "the scoring process", "no score within the CPU time of --reward-cpu-limit")


def _reply(line: bytes) -> dict:
    """Parse a worker's line. Raise Lost if it is something else: the user's function can write to any file descriptor."""
    with contextlib.suppress(ValueError, RecursionError):
        reply = json.loads(line)
        shapes = ({"ready"}, {"failed"}, {"number", "value"}, {"number", "failed", "event"})
        if isinstance(reply, dict) and reply.keys() in shapes and isinstance(reply.get("number", 0), int):
            return reply
    raise Lost(*WROTE)

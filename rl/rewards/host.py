"""The parent of a rank's scoring processes: `python -m rl.rewards.host SETTINGS`, started by rl/rewards/pool.py.

It reads a response per line, gives it to a scoring process (rl/rewards/worker.py), and writes a line with its reply. pebble
ends a process that takes too long, and notices if one ends. If the process worked on several responses, any of them may be at
fault: each is scored again, alone, so that only the one at fault gets no score.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from queue import Empty, SimpleQueue
from typing import Any

from pebble import ProcessExpired, ProcessPool

from rl.rewards import worker

START_LIMIT = 60  # seconds that a scoring process may take to import the user's file
FIRST_CALL = 60  # extra seconds for the very first response: the function may import or load something
AT_ONCE = 64  # responses that an async function works on at once in each process
QUICK = 0.1  # seconds of work that a process gets at once, so that quick functions do not wait for messages
GONE = 5  # seconds after its end in which pebble has said what became of a process, or never will
BLOCKED = "the reward function blocked its event loop: await what takes time, or give it to asyncio.to_thread"


class Lost(Exception):
    """The loss of a scoring process. `event` is one of rl/rewards/pool.py's EVENTS."""

    def __init__(self, event: str, message: str):
        super().__init__(message)
        self.event = event


@dataclass
class Shared:
    """What the threads of this process share."""

    spec: str  # path/to/file.py:f,g; empty for the built-in graders
    weights: list[float]  # of the functions
    timeout: float  # seconds that a response may take
    memory: int  # bytes that a process may allocate
    workers: int
    replies: int  # the file to write to
    queue: SimpleQueue = field(default_factory=SimpleQueue)  # of responses, as (number, JSON)
    lock: threading.Lock = field(default_factory=threading.Lock)
    first_calls: list[float] = field(default_factory=list)  # seconds that processes took for their first response

    def reply(self, number: int, reply: str) -> None:
        """Write a line: the number of a response and its reply as JSON, or 0 and news of the start."""
        data = f"{number} {reply}\n".encode()
        with self.lock:
            while data:
                data = data[os.write(self.replies, data) :]


class Lane:
    """A thread with a scoring process, and the responses that the process works on."""

    def __init__(self, shared: Shared):
        self._shared = shared
        self._suspects: deque[tuple[int, str]] = deque()  # to be scored alone: they were under way when a process was lost
        self._under_way: dict[int, str] = {}
        self._room = 1  # responses that the process works on at once
        self._pool: ProcessPool | None = None

    def run(self) -> None:
        """Score responses until this process ends."""
        try:
            loaded = self._start()
            self._shared.reply(0, json.dumps(loaded))
            while True:
                self._score(self._take())
        except BaseException as error:
            self._shared.reply(0, json.dumps({"failed": worker.describe(error)}))

    def _start(self) -> dict[str, Any]:
        """Start a process in place of a lost one. Return what worker.load does. Raise Lost if it cannot load the function."""
        if self._pool:
            self._pool.stop()
            self._pool.join()
        self._pool = ProcessPool(1, context=get_context("fork"))
        self._pid: int | None = None
        self._has_answered = False
        self._began = 0.0  # when the process got its first response
        try:
            loaded = self._ask(worker.load, self._shared.spec, self._shared.weights, self._shared.memory, seconds=START_LIMIT)
        except Lost as lost:
            raise Lost(lost.event, f"importing it does not work: {lost}") from None
        if "failed" in loaded:
            raise Lost("error", loaded["failed"])
        self._pid = loaded["pid"]
        self._is_async = loaded["is_async"]
        self._room = AT_ONCE if self._is_async else 1
        return loaded

    def _ask(self, function: Callable, *arguments: Any, seconds: float) -> Any:
        """Return the function's value, computed in the scoring process. Raise Lost if the process is lost, and RuntimeError if
        it had ended before, which pebble does not always notice: the process may have kept the lock of pebble's pipe."""
        future = self._pool.schedule(function, arguments, timeout=seconds)
        gone = 0
        while wait([future], timeout=1.0).not_done:
            gone += self._pid is not None and not _lives(self._pid)
            if gone == GONE:
                raise RuntimeError("the scoring process has ended")
        try:
            return future.result()
        except TimeoutError:
            raise Lost("timeout", f"no answer after {seconds:g} s") from None
        except ProcessExpired as error:
            raise Lost("died", f"the scoring process {worker.how_it_ended(error.exitcode)}") from None

    def _take(self) -> dict[int, str]:
        """Return further responses for the process, at least one unless some are under way; a suspect is alone."""
        if self._suspects:
            return {} if self._under_way else dict([self._suspects.popleft()])
        queue = self._shared.queue
        room = self._room if self._is_async else min(self._room, 1 + queue.qsize() // self._shared.workers)
        new = {}
        while len(new) + len(self._under_way) < room:
            try:
                number, item = queue.get(block=not (new or self._under_way))
            except Empty:
                break
            new[number] = item
        return new

    def _score(self, new: dict[int, str]) -> None:
        """Give the process these responses, and hand on the replies of those that have ended."""
        self._under_way |= new
        seconds = self._shared.timeout
        if not self._has_answered:
            seconds += max(self._shared.first_calls, default=FIRST_CALL)  # to import or load something
        began = time.monotonic()
        self._began = self._began or began
        try:
            if self._is_async:
                replies = self._ask(worker.advance, new, seconds, seconds=seconds)
            else:
                replies = self._ask(worker.score, new, seconds=seconds)
        except Lost as lost:
            self._find_fault(lost)
            self._start()
            return
        except (BrokenProcessPool, RuntimeError):  # the process had ended before: these responses are not at fault
            self._suspects.extend(self._under_way.items())
            self._under_way = {}
            self._start()
            return
        now = time.monotonic()
        if not self._is_async:
            self._room = max(1, min(AT_ONCE, int(len(new) * QUICK / (now - began))))
        if replies and not self._has_answered:
            self._has_answered = True
            self._shared.first_calls.append(now - self._began)
        for number, reply in replies.items():
            del self._under_way[number]
            self._shared.reply(number, reply)

    def _find_fault(self, lost: Lost) -> None:
        """Reply that the response that was under way has no score. If there were several, they become suspects."""
        if not self._has_answered:
            self._shared.first_calls.append(0.0)  # no import took that long
        if len(self._under_way) > 1:
            self._suspects.extend(self._under_way.items())
        else:
            message = (
                "" if lost.event == "timeout" and not self._is_async else BLOCKED if lost.event == "timeout" else str(lost)
            )
            for number in self._under_way:
                self._shared.reply(number, json.dumps({"failed": message, "event": lost.event}))
        self._under_way = {}


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(settings: dict) -> None:
    """Serve until the rank closes its end or ends, and then end everything in this process group."""
    items = os.fdopen(os.dup(0))  # not sys.stdin, which a fork closes, and would wait for its lock
    replies = os.dup(1)
    os.register_at_fork(after_in_child=lambda: os.close(replies))  # only this process writes there
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    shared = Shared(**settings, replies=replies)
    for _ in range(shared.workers):
        threading.Thread(target=Lane(shared).run, daemon=True).start()
    for line in items:
        number, _, item = line.partition(" ")
        shared.queue.put((int(number), item))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

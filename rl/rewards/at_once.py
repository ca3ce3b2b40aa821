"""Many responses at once in one scoring process: what a thread of the pool does where the reward function is async.

The process ends a response that takes too long by itself, and works on the others. It is lost if it dies, or if a response
blocks its event loop. Nobody knows then which one it was: all that were under way are scored again, each alone, so that the one
at fault costs itself.
"""

import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from rl.rewards.process import WROTE, Lost, ScoringProcess

Task = tuple[Any, str]  # a response's key, and its item as JSON
LOOK = 0.02  # seconds after which one who waits for answers looks for new responses
GRACE = 10  # seconds beyond a response's limit, by which a process that is not blocked has ended the response
BLOCKED = "the reward function blocked its event loop: await what takes time, or give it to asyncio.to_thread"


class AtOnce:
    """The responses that one process works on."""

    def __init__(self, process: ScoringProcess, queue: SimpleQueue, suspects: deque[Task], most: int):
        """queue: of new ones, None for no more; suspects: those that were under way when a process was lost; most: at once."""
        self.process, self.most = process, most
        self._queue, self._suspects = queue, suspects
        self._under_way: dict[int, tuple[Task, float]] = {}  # by number, with the time by which it has to be answered
        self._is_alone = False  # what is under way is a suspect
        self._begun = 0.0
        self.first_answer = 0.0  # seconds after the first response began; 0 before

    def take(self, limit: Callable[[], float]) -> bool:
        """Begins all there is room for; waits where nothing is under way. False if there will be no more. limit: the seconds
        that a response may take. Raises Lost."""
        while len(self._under_way) < (1 if self._is_alone else self.most):
            if self._suspects and self._under_way:
                return True
            try:
                self._is_alone = bool(self._suspects)
                task = self._suspects.popleft() if self._is_alone else self._queue.get(block=not self._under_way)
            except (Empty, IndexError):  # IndexError: another thread was faster
                return True
            if task is None:
                return False
            if not self._under_way:
                self._check_idle(task)
            self._begun = self._begun or time.monotonic()
            number = self.process.put(task[1], limit())
            self._under_way[number] = task, time.monotonic() + limit() + GRACE
        return True

    def hear(self) -> list[tuple[Any, dict]]:
        """The key and the process's reply of each response that has been answered. Raises Lost."""
        replies = self.process.exchange(LOOK)
        if any(reply.get("number") not in self._under_way for reply in replies):
            raise Lost(*WROTE)
        if replies and not self.first_answer:
            self.first_answer = time.monotonic() - self._begun
        if not replies and any(time.monotonic() > until for _, until in self._under_way.values()):
            raise Lost("timeout", BLOCKED)
        return [(self._under_way.pop(reply["number"])[0][0], reply) for reply in replies]

    def at_fault(self) -> list[Any]:
        """The key of the response that has lost the process, or none: several are scored again."""
        tasks = [task for task, _ in self._under_way.values()]
        if len(tasks) == 1:
            return [tasks[0][0]]
        self._suspects.extend(tasks)
        return []

    def _check_idle(self, task: Task) -> None:
        """Raises Lost if the process was lost before this response, which has no part in it."""
        try:
            if self.process.exchange(0):
                raise Lost(*WROTE)
        except Lost:
            self._suspects.append(task)
            raise

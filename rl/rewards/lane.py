"""The work of a thread of the scoring pool: it gives responses to a scoring process, and replaces the process when it is lost.

A process works on one response at a time, or on many if the reward function is async. If it is lost while it works on several,
any of them may be at fault: each is scored again on its own, so that only the one at fault gets no score.
"""

import json
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any

from rl.errors import UserError
from rl.rewards.args import RewardArgs
from rl.rewards.process import WROTE, Lost, ScoringProcess
from rl.rewards.score import EVENTS, Score, as_score
from rl.rewards.verifiers import BUILT_IN, code

Task = tuple  # a response's key, and its item as JSON

START_LIMIT = 60  # seconds that a scoring process may take to import the user's file
FIRST_CALL = 60  # extra seconds for the very first response: the function may import or load something
LOST_LIMIT = 16  # processes that may be lost before anything has been scored
BAD_STARTS = 3  # consecutive processes of a thread that may be lost before they are ready; none may until one has been ready
LOOK = 0.02  # seconds between looks for new responses while others are under way
GRACE = 10  # seconds beyond its limit in which the process cancels an async response, unless the process is blocked
BLOCKED = "the reward function blocked its event loop: await what takes time, or give it to asyncio.to_thread"


class Lanes:
    """What the threads of a pool share."""

    def __init__(self, args: RewardArgs):
        self.args = args
        self.queue: SimpleQueue[tuple[Any, str] | None] = SimpleQueue()  # keys, and items as JSON; None ends a thread
        self.done: SimpleQueue[tuple[Any, Score | None]] = SimpleQueue()
        self.begun = threading.Event()  # a process is ready, or a thread has failed
        self.closed = False
        self.has_scored = False  # at least one response has a score
        self.lost: list[Lost] = []  # how processes were lost
        self.first_calls: list[float] = []  # seconds that processes took for their first response
        self.failure: Exception | None = None

    def finish(self, key: Any, score: Score) -> None:
        """Hand over a response's score."""
        self.has_scored = self.has_scored or not score.event
        self.done.put((key, score))

    def fail(self, error: Exception) -> None:
        """Hand over an error, which ends the run."""
        self.failure = error
        self.begun.set()
        self.done.put((None, None))  # wakes the rank


class Lane:
    """A thread's scoring process, and the responses that it works on."""

    def __init__(self, pool: Lanes):
        self._pool = pool
        self._args = pool.args
        self._process: ScoringProcess | None = None
        self._suspects: deque[Task] = deque()  # to be scored one at a time, since they were under way when a process was lost
        self._under_way: dict[int, tuple[Task, float, float]] = {}  # number -> response, start, limit in seconds
        self._is_async = False
        self._has_answered = False  # whether the process has answered once
        self._bad_starts = 0

    def run(self) -> None:
        """Use one scoring process after another, until the pool is closed."""
        try:
            while not self._pool.closed:
                with ScoringProcess(self._args, first=not self._pool.begun.is_set()) as self._process:
                    self._use_process()
        except Exception as error:
            self._pool.fail(error)

    def _await_ready(self) -> None:
        """Return when the process is ready or the pool is closed. Raise UserError if the import fails, Lost if the process is
        lost and another one should be tried."""
        until = time.monotonic() + START_LIMIT
        try:
            while not (replies := self._process.exchange(LOOK)):
                if self._pool.closed:
                    return
                if time.monotonic() > until:
                    raise self._error(f"the scoring process was not ready after {START_LIMIT} s")
            if "failed" in replies[0]:
                raise self._error(replies[0]["failed"])
            if "ready" not in replies[0] or len(replies) > 1:
                raise Lost(*WROTE)
        except Lost as lost:
            self._bad_starts += 1
            if self._bad_starts > BAD_STARTS or not self._pool.begun.is_set():
                raise self._error(f"importing it does not work: {lost}") from None
            raise
        self._bad_starts = 0
        self._is_async = replies[0]["ready"] == "async"
        self._has_answered = False
        self._pool.begun.set()

    def _use_process(self) -> None:
        """Let the process score responses until it is lost or the pool is closed. Raise UserError if LOST_LIMIT processes have
        been lost and nothing has been scored."""
        try:
            self._await_ready()
            while not self._pool.closed and self._take():
                self._hear()
        except Lost as lost:
            self._pool.lost.append(lost)
            count = len(self._pool.lost)
            if count >= LOST_LIMIT and not self._pool.has_scored:
                raise self._error(
                    f"{count} scoring processes were lost before anything was scored. The last one: {lost.event}: {lost}"
                ) from None
            self._find_fault(lost)

    def _take(self) -> bool:
        """Give the process as many responses as it has room for; if none is under way, wait for one. Return False when the pool
        is closed. Raise Lost if the process is lost."""
        room = self._args.reward_concurrency if self._is_async else 1
        while len(self._under_way) < (1 if self._suspects else room):
            try:
                task = self._suspects[0] if self._suspects else self._pool.queue.get(block=not self._under_way)
            except Empty:
                return True
            if task is None:
                return False
            if not self._under_way:
                self._check_idle(task)
            seconds = self._limit()
            self._under_way[self._process.put(task[1], seconds)] = task, time.monotonic(), seconds
        return True

    def _check_idle(self, task: Task) -> None:
        """Raise Lost if the process was lost before it got this response, which then is not at fault."""
        try:
            self._process.check_idle()
        except Lost:
            if not self._suspects:
                self._suspects.append(task)
            raise

    def _hear(self) -> None:
        """Hand back the scores that the process has sent, after at most LOOK seconds. Raise Lost if the process is lost."""
        replies = self._process.exchange(LOOK)
        if len(self._under_way.keys() & [reply.get("number") for reply in replies]) < len(replies):
            raise Lost(*WROTE)
        for reply in replies:
            (key, item), started, _ = self._under_way.pop(reply["number"])
            if self._suspects:
                self._suspects.popleft()
            if not self._has_answered:
                self._has_answered = True
                self._pool.first_calls.append(time.monotonic() - started)
            self._pool.finish(key, self._score(item, reply))
        if not replies:
            self._check_time()

    def _check_time(self) -> None:
        """Raise Lost if a response takes too long. Normally the process itself cancels an async one."""
        now = time.monotonic()
        for _, started, seconds in self._under_way.values():
            if now > started + (seconds + GRACE if self._is_async else self._limit()):
                if not self._has_answered:
                    self._pool.first_calls.append(0.0)  # no import took that long
                raise Lost("timeout", BLOCKED if self._is_async else self._too_late())

    def _find_fault(self, lost: Lost) -> None:
        """Hand back the response that was under way when the process was lost. If there were several, they become suspects."""
        tasks = [task for task, _, _ in self._under_way.values()]
        self._under_way.clear()
        if len(tasks) != 1:
            self._suspects.extend(tasks)
            return
        if self._suspects:
            self._suspects.popleft()
        key, item = tasks[0]
        self._pool.finish(key, self._unscored(item, lost.event, str(lost)))

    def _limit(self) -> float:
        """Return the seconds that a response may take."""
        if self._has_answered or self._args.judge:
            return self._args.reward_timeout
        return self._args.reward_timeout + max(self._pool.first_calls, default=FIRST_CALL)  # to import or load something

    def _too_late(self) -> str:
        return f"no score after {self._args.reward_timeout:g} s (--reward-timeout)"

    def _score(self, item: str, reply: dict) -> Score:
        if "failed" not in reply:
            return as_score(reply["value"])
        event = reply["event"] if reply["event"] in EVENTS else "error"
        return self._unscored(item, event, self._too_late() if event == "timeout" else reply["failed"])

    def _unscored(self, item: str, event: str, message: str) -> Score:
        """Return the score of a response whose process was lost or whose function failed. An answer that a built-in grader
        cannot finish grading gets the score of an empty one, its lowest. A program fails inside the sandbox, so an error of the
        grader itself is not the program's fault."""
        if not self._args.own_reward:
            its = json.loads(item)
            grader = BUILT_IN[its["data_source"]]
            if event == "timeout" or (event == "error" and grader is not code):
                return as_score(grader(**its | {"solution_str": ""}))
        return Score(None, event=event, message=str(message)[:500])

    def _error(self, message: str) -> UserError:
        return UserError(f"{self._args.own_reward or 'scoring'}: {message}")

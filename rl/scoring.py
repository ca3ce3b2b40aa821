"""Scores for responses: the pool that runs the built-in verifiers (rl/verifiers.py) or the user's own function.

The pool runs them in processes of their own, so that a response that cannot be scored - the function hangs, raises, returns
no finite number, eats the memory, dies - becomes a counted event, never a stuck run: it is left out of the training
(--on-error). The worker is rl/reward_worker.py; what passes between is JSON, nothing is pickled.

The rank looks in between two engine steps only. A worker that is quick has several responses in its pipe, or it would score one
a step; when it turns out to be slow, workers that have nothing to do get those that it has not begun.
"""

import json
import math
import os
import select
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rl.errors import UserError
from rl.ranges import LARGEST_FLOAT, Range
from rl.scoring_process import ScoringProcess
from rl.verifiers import BUILT_IN, HARMLESS, gsm8k, verifier_name


@dataclass
class RewardArgs:
    """Scores of responses."""

    reward: str | None = None
    """Your own reward function, as path/to/file.py:function. It is called with (data_source, solution_str, ground_truth,
    extra_info) and returns a number, or a dict with "score" and further numbers, which become metrics."""
    reward_timeout: Annotated[float, Range(above=0, at_most=86_400)] = 10.0
    """Seconds that scoring a response may take. For one that takes longer see --on-error."""
    reward_cpu_limit: Annotated[float, Range(at_least=0, at_most=86_400)] = 60.0
    """CPU seconds that scoring a response may take, over all threads of its process; 0 is no limit."""
    reward_workers: Annotated[int, Range(at_least=1, at_most=1024)] = 1
    """Scoring processes on each rank."""
    reward_memory_limit_gb: Annotated[float, Range(at_least=0, at_most=1_000_000)] = 4.0
    """Address space of each scoring process, in GiB; 0 is no limit."""
    on_error: Literal["mask", "zero"] = "mask"
    """What to do with a response that could not be scored. mask: leave it out of the loss, the baseline and mean scores; zero:
    give it a score of 0. It is counted either way. In a validation it counts as wrong, with 0 or, where that is below 0, the
    worst score of its source in this validation."""
    format_score: Annotated[float, Range()] = 0.0
    """Score of a wrong answer in the right format, from the built-in gsm8k."""
    overlong_buffer_len: Annotated[int, Range(at_least=0)] = 0
    """DAPO: a response that ends within this many tokens of --max-response-length is penalised, linearly; 0 turns it off."""
    overlong_penalty_factor: Annotated[float, Range(at_least=0)] = 1.0
    """DAPO: the penalty of a response of --max-response-length."""

    def check(self) -> None:
        """Raises UserError for a --reward that names no file."""
        if not self.reward:
            return
        path, _, function = self.reward.rpartition(":")
        if not path or not function:
            raise UserError(f"--reward {self.reward}: write it as path/to/file.py:function.")
        if not Path(path).is_file():
            raise UserError(f"--reward {self.reward}: there is no file {path}.")


EVENTS = ("timeout", "error", "bad_value", "died", "image")  # image: the prompt's is damaged (rl/generator.py)


@dataclass(frozen=True)
class Score:
    score: float | None  # None if an event kept the response from being scored
    extra: dict[str, float] = field(default_factory=dict)
    event: str | None = None  # one of EVENTS
    message: str = ""  # how it came to the event

    @property
    def error(self) -> str | None:
        """The event in words; None if there was none."""
        return f"{self.event}: {self.message}" if self.event else None


START_LIMIT = 60  # seconds a scoring process may take to import the user's file, or what its first call imports
LOST_LIMIT = 16  # processes that may be lost before anything has been scored
RECALL = 0.1  # seconds without an answer after which idle workers get what it has not begun


def overlong_penalty(length: int, max_response_length: int, buffer_len: int, factor: float) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13), in [-factor, 0]: 0 up to max_response_length - buffer_len tokens,
    then falling linearly."""
    if buffer_len <= 0:
        return 0.0
    over = length - (max_response_length - buffer_len)
    return min(-over / buffer_len * factor, 0.0)


def check_sources(sources: dict[str, str], args: RewardArgs) -> None:
    """sources: data_source -> where it first stands. Raises UserError for one that no verifier serves; --reward serves all."""
    for source, where in sources.items():
        if not args.reward and verifier_name(source) is None:
            raise UserError(
                f"{where}: there is no built-in reward for data_source {source!r}. Give your own with --reward "
                f"file.py:function, or use one of: {', '.join(BUILT_IN)}."
            )


# ------------------------------------------------------------------------------------------------------- the pool


def _kill_all(workers: list[ScoringProcess], owner: int) -> None:
    while workers and os.getpid() == owner:  # a fork of the rank must not end the rank's workers
        workers.pop().kill()


class ScoringPool:
    """Scores (key, response) items in the background; `submit` never blocks, `poll` and `wait` hand back what is done.

    A user's function is imported in the first worker right away, so that a file that cannot be is a UserError at the start.
    """

    def __init__(self, args: RewardArgs):
        self.args = args
        self.events: Counter[str] = Counter()
        self.last_message: dict[str, str] = {}  # per kind of event
        self._queue: deque[tuple[Any, str]] = deque()
        self._done: list[tuple[Any, Score]] = []
        self._workers: list[ScoringProcess] = []
        self._bad_starts = 3  # in a row; one good start clears them, before the first one is too many
        self._first_call = float(START_LIMIT)  # seconds more for a process's first response: it may import or load something
        self._answered, self._scored, self._lost = 0, 0, 0  # responses with an answer, with a score; processes
        self._at_exit = weakref.finalize(self, _kill_all, self._workers, os.getpid())
        if args.reward:
            try:
                self._start_worker()
                while not self._workers[0].ready:
                    self._sleep(0.05)
                    self._drive()
            except BaseException:
                self.close()
                raise

    def submit(self, key: Any, data_source: str, text: str, ground_truth: Any, extra_info: dict | None = None) -> None:
        if not self.args.reward:
            check_sources({data_source: f"response {key}"}, self.args)
            data_source = verifier_name(data_source)  # the worker looks it up in BUILT_IN
            function = BUILT_IN[data_source]
            if function in HARMLESS:
                graded = self.args.format_score and function is gsm8k
                value = function(
                    data_source, text, ground_truth, **({"format_score": self.args.format_score} if graded else {})
                )
                self._done.append((key, Score(value, {"acc": float(value == 1)} if graded else {})))
                return
        item = {
            "data_source": data_source,
            "solution_str": text,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        }
        self._queue.append((key, json.dumps(item, default=_plain)))
        self._drive()

    @property
    def pending(self) -> int:
        return len(self._queue) + sum(len(worker.items) for worker in self._workers) + len(self._done)

    def poll(self) -> list[tuple[Any, Score]]:
        """The responses scored since the last call."""
        self._drive()
        done = self._done[:]
        self._done.clear()
        return done

    def wait(self, timeout: float) -> list[tuple[Any, Score]]:
        """Like poll, but sleeps up to `timeout` seconds until there is something."""
        deadline = time.monotonic() + timeout
        while not (done := self.poll()) and self.pending and (left := deadline - time.monotonic()) > 0:
            self._sleep(min(left, 0.05))
        return done

    def close(self) -> None:
        _kill_all(self._workers, os.getpid())

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _sleep(self, seconds: float) -> None:
        """Sleeps until a worker sends something, at most so many seconds."""
        poller = select.poll()
        for worker in self._workers:
            worker.register(poller)
        poller.poll(seconds * 1000)

    def _start_worker(self) -> None:
        self._workers.append(ScoringProcess(self.args.reward, self.args.reward_memory_limit_gb, self.args.reward_cpu_limit))

    @property
    def _has_idle(self) -> bool:
        """Whether a worker has nothing to do, or may yet be started."""
        return len(self._workers) < self.args.reward_workers or any(worker.is_idle for worker in self._workers)

    def _drive(self) -> None:
        """Collects answers, ends what is late or dead, and gives idle workers the next item."""
        for worker in list(self._workers):
            self._look_at(worker)
        busy = sum(bool(worker.items) for worker in self._workers)
        while len(self._workers) < min(self.args.reward_workers, len(self._queue) + busy):
            self._start_worker()
        while self._queue and (free := [worker for worker in self._workers if worker.has_room]):
            min(free, key=lambda worker: len(worker.items)).give(*self._queue.popleft())

    def _look_at(self, worker: ScoringProcess) -> None:
        """Deals with what has come of the worker, or has not; it may have to go, or others get what it has not begun."""
        worker.write()
        replies, ended = worker.replies()
        if not all(self._take(worker, reply) for reply in replies):
            return  # it is gone
        seconds = time.monotonic() - worker.started
        if ended:
            self._lose(worker, *worker.ending())
        elif not worker.ready:
            if seconds > START_LIMIT:
                self._refuse(f"the scoring process was not ready after {START_LIMIT} s")
        elif worker.items:
            if seconds > self._limit(worker):
                self._time_out(worker)
            elif len(worker.items) > 1 and (seconds > RECALL or not worker.quick) and self._has_idle:
                self._queue.extendleft(reversed(worker.take_back()))
        elif worker.recalled and seconds > self.args.reward_timeout:
            self._lose(worker, "died", "on a response that another one has got since")  # nothing is lost by it

    def _take(self, worker: ScoringProcess, reply: dict | None) -> bool:
        """Deals with one line of the worker's; False if the worker had to go."""
        number = reply and reply.get("number")
        if not worker.items and number in worker.recalled:
            back = worker.recalled.pop(number)
            worker.started = time.monotonic()
            if "dropped" not in reply and back in self._queue:  # begun before it knew, and nobody else has it yet
                self._queue.remove(back)
                self._score(back[0], reply)
            return True
        if reply is None or (worker.ready and (not worker.items or number != worker.items[0][0] or "dropped" in reply)):
            self._lose(worker, "error", "the reward function wrote to the scoring process's own output")
            return False
        if not worker.ready:
            if "failed" in reply:
                self._refuse(reply["failed"])
            worker.ready, self._bad_starts = True, 0
            return True
        if number == 1:
            seconds = time.monotonic() - worker.started
            self._first_call = max(self._first_call, seconds) if self._answered else seconds
        self._answered += 1
        self._score(worker.answered(reply["seconds"]), reply)
        return True

    def _score(self, key: Any, reply: dict) -> None:
        if "failed" in reply:
            self._record(key, Score(None, event="error", message=f"{reply['failed']:.500}"))
        else:
            self._record(key, as_score(reply["value"]))

    def _limit(self, worker: ScoringProcess) -> float:
        """Seconds that the worker may take for its item."""
        return self.args.reward_timeout + (self._first_call if worker.items[0][0] == 1 else 0.0)

    def _time_out(self, worker: ScoringProcess) -> None:
        message = f"no score after {self.args.reward_timeout:g} s (--reward-timeout)"
        if worker.items[0][0] == 1 and self._first_call >= 1:
            message += (
                f" and {self._first_call:.3g} s for what a first call imports or loads, better done when the file is imported"
            )
            self._first_call = self._first_call if self._answered else 0.0  # it was not that
        self._lose(worker, "timeout", message)

    def _lose(self, worker: ScoringProcess, event: str, message: str) -> None:
        back = worker.take_back() if worker.items else []
        worker.kill()
        self._workers.remove(worker)
        self._lost += worker.ready
        if self._lost >= LOST_LIMIT and not self._scored:
            self._refuse(
                f"{self._lost} scoring processes were lost before anything was scored, the last so: {event}: {message}"
            )
        if not worker.ready:  # or it would be started, and end, for ever
            self._bad_starts += 1
            if self._bad_starts > 3:
                self._refuse(f"importing it does not work: {message}")
        if worker.items:
            self._queue.extendleft(reversed(back))
            self._record(worker.items[0][1], Score(None, event=event, message=message))
        elif event != "died" and not worker.recalled:  # who has got what was recalled counts it
            self._count(event, message)

    def _refuse(self, message: str) -> None:
        raise UserError(f"--reward {self.args.reward}: {message}" if self.args.reward else f"scoring: {message}")

    def _record(self, key: Any, score: Score) -> None:
        if score.event:
            self._count(score.event, score.message)
        else:
            self._scored += 1
        self._done.append((key, score))

    def _count(self, event: str, message: str) -> None:
        self.events[event] += 1
        self.last_message[event] = message


def as_score(value: Any) -> Score:
    """The return value of a reward function as a Score; anything but a finite number of fp32 is a bad_value event."""
    score, extra = value, {}
    if isinstance(value, dict):
        extra = {k: float(v) for k, v in value.items() if k != "score" and _is_number(v)}
        score = value.get("score")
    if not (_is_number(score) and abs(score) <= LARGEST_FLOAT):
        wanted = 'which has no finite number under "score"' if isinstance(value, dict) else "not a finite number"
        wanted += " of fp32"
        return Score(None, event="bad_value", message=f"the reward function returned {value!r:.100}, {wanted}")
    return Score(float(score), extra)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def _plain(value: Any) -> Any:
    """numpy scalars and arrays, bytes and dates of a parquet row, as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)

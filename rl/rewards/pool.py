"""Scores for responses: the pool that runs the built-in verifiers (rl/rewards/verifiers.py) or the user's own function.

The pool runs them in processes of their own, so that a response that cannot be scored - the function hangs, raises, returns
no finite number, eats the memory, dies - becomes a counted event, never a stuck run: it is left out of the training
(--on-reward-error). The worker is rl/rewards/worker.py; what passes between is JSON, nothing is pickled.
"""

import contextlib
import functools
import json
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Literal

import torch

from rl.errors import UserError
from rl.ranges import Content, MayChange, Range, check_code
from rl.ranks import dist
from rl.rewards.at_once import AtOnce, Task
from rl.rewards.environment import check_passed
from rl.rewards.judge_args import JudgeArgs
from rl.rewards.process import Lost, ScoringProcess
from rl.rewards.programs.args import CODE, CodeArgs
from rl.rewards.score import EVENTS, Score, as_score, of_reply, plain
from rl.rewards.verifiers import BUILT_IN, HARMLESS, code, gsm8k, verifier_name


@dataclass
class RewardArgs(JudgeArgs, CodeArgs):
    """The reward function, and what happens when it fails."""

    reward: Annotated[str | None, Content("code")] = None
    """Your own reward function, as path/to/file.py:function. It is called with (data_source, solution_str, ground_truth,
    extra_info) and returns a number, or a dict with "score" and further numbers, which become metrics. It may be async.
    Or "code": responses are programs, which are tested in a sandbox."""
    reward_timeout: MayChange[Annotated[float, Range(above=0, at_most=86_400)]] = 10.0
    """Seconds that scoring a response may take; --on-reward-error says what happens after that."""
    reward_cpu_limit: MayChange[Annotated[float, Range(at_least=0, at_most=86_400)]] = 60.0
    """CPU seconds that scoring a response may take, over all threads of its process; 0 is no limit."""
    reward_workers: MayChange[Annotated[int, Range(at_least=1, at_most=1024)]] = 1
    """Scoring processes on each rank."""
    reward_concurrency: MayChange[Annotated[int, Range(at_least=1, at_most=65_536)]] = 64
    """Responses that an async reward function, or the judge, works on at once in each process."""
    reward_memory_limit_gb: MayChange[Annotated[float, Range(at_least=0, at_most=1_000_000)]] = 4.0
    """Address space of each scoring process, in GiB; 0 is no limit."""
    reward_env: MayChange[tuple[str, ...]] = ()
    """Environment variables to pass to the reward function and to environments, by name or pattern (MY_*). Without this,
    secrets (*TOKEN*, *KEY*, *SECRET*, AWS_*, HF_*, WANDB_*, ...) and those of the job (RANK, MASTER_*, ...) are removed."""
    on_reward_error: Literal["mask", "zero"] = "mask"
    """What to do with a response that could not be scored. mask: leave it out of the loss, the baseline and mean scores; zero:
    give it a score of 0. It is counted either way. In validation it counts as wrong: it gets 0, or the worst score of its
    source if that is below 0."""
    format_score: Annotated[float, Range()] = 0.0
    """Score of a wrong answer in the right format, from the built-in gsm8k."""
    overlong_buffer_len: Annotated[int, Range(at_least=0)] = 0
    """DAPO: a response that ends within this many tokens of --max-response-length is penalised, linearly; 0 turns it off."""
    overlong_penalty_factor: Annotated[float, Range(at_least=0)] = 1.0
    """DAPO: the penalty of a response of --max-response-length."""

    @property
    def own_reward(self) -> str | None:
        """What scores all responses, in the words of its flag; None where the built-in verifiers do."""
        if self.judge:
            return f"--judge {self.judge}"
        return f"--reward {self.reward}" if self.reward and self.reward != CODE else None

    def check(self) -> None:
        """Raises UserError for a --reward that names no file."""
        if self.judge and self.reward:
            raise UserError("--reward and --judge: a response has one score. Call the judge in your function (docs/judges.md).")
        if not self.reward or self.reward == CODE:
            return
        check_code("--reward", self.reward, "function")


START_LIMIT = 60  # seconds a scoring process may take to import the user's file
FIRST_CALL = 60  # seconds more that the first response of all may take: the function may import or load something then
LOST_LIMIT = 16  # processes that may be lost before anything has been scored
BAD_STARTS = 3  # processes in a row, of one thread, that may end before they are ready; before the first one is, none may


def can_score(source: str, args: RewardArgs) -> bool:
    """Whether a response to a prompt of this data_source can be scored."""
    return bool(args.own_reward) or verifier_name(source, args.reward) is not None


def check_sources(sources: dict[str, str], args: RewardArgs) -> None:
    """sources: data_source -> where it first stands. Raises UserError for one that no verifier serves (--reward serves all),
    and for programs without a sandbox that holds."""
    for source, where in sources.items():
        if not can_score(source, args):
            raise UserError(
                f"{where}: there is no built-in reward for data_source {source!r}. Give your own with --reward "
                f"file.py:function, or use one of: {', '.join(BUILT_IN)}."
            )
    if not args.own_reward and any(BUILT_IN[verifier_name(source, args.reward)] is code for source in sources):
        from rl.rewards.programs import sandbox  # late: of use to those alone who train on programs

        sandbox.check()


# ------------------------------------------------------------------------------------------------------- the pool


class _Closed(Exception):
    """Ends the threads of a pool that is closed."""


class ScoringPool:
    """Scores (key, response) items in the background; `submit` never blocks, `poll` and `wait` hand back what is done.

    A thread for each scoring process gives it one response at a time and replaces it when it is lost. The rank counts, and
    raises what a thread fails with. A user's function is imported in the first process right away, so that a file that cannot
    be is a UserError at the start. The processes end with the pool: when it is closed, dropped, or Python ends.
    """

    def __init__(self, args: RewardArgs):
        self.args = args
        self.events: Counter[str] = Counter()
        self.last_message: dict[str, str] = {}  # per kind of event
        self.pending = 0  # responses that have not been handed back
        self._scored, self._lost = 0, 0  # responses with a score; processes
        self._threads = _Threads(args)
        self._finalizer = weakref.finalize(self, self._threads.close)
        if args.own_reward:
            check_passed(args.reward_env)
            try:
                self._threads.start_one()
                self._threads.begun.wait()
                self._threads.raise_failure()
            except BaseException:
                self.close()
                raise

    def submit(
        self, key: Any, data_source: str, text: str, ground_truth: Any, extra_info: dict | None = None, prompt: Any = None
    ) -> None:
        """prompt: for the judge, messages or text."""
        self._threads.raise_failure()
        more = {"prompt": prompt} if self.args.judge else {}
        if not self.args.own_reward:
            check_sources({data_source: f"response {key}"}, self.args)
            data_source = verifier_name(data_source, self.args.reward)  # the worker looks it up in BUILT_IN
            function = BUILT_IN[data_source]
            more = {"limits": self.args.limits(self.args.reward_timeout)} if function is code else {}
            if function in HARMLESS:
                graded = self.args.format_score and function is gsm8k
                value = function(
                    data_source, text, ground_truth, **({"format_score": self.args.format_score} if graded else {})
                )
                self.hand_back(key, Score(value, {"acc": float(value == 1)} if graded else {}))
                return
        item = {
            "data_source": data_source,
            "solution_str": text,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        } | more
        self._threads.queue.put((key, json.dumps(item, default=plain)))
        self.pending += 1
        if len(self._threads) < min(self.args.reward_workers, self.pending):
            self._threads.start_one()

    def hand_back(self, key: Any, score: Score) -> None:
        """Takes a score that was found elsewhere, to be handed back with the others."""
        self._threads.done.put(([(key, score)], None))
        self.pending += 1

    def poll(self) -> list[tuple[Any, Score]]:
        """The responses scored since the last call."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> list[tuple[Any, Score]]:
        """Like poll, but sleeps up to `timeout` seconds until there is something."""
        self._threads.raise_failure()
        done: list[tuple[Any, Score]] = []
        with contextlib.suppress(Empty):
            while len(done) < self.pending:
                scores, lost = self._threads.done.get(timeout=0.0 if done else timeout)
                self._threads.raise_failure()
                done += scores
                self._count([score for _, score in scores], lost)
        self.pending -= len(done)
        return done

    def close(self) -> None:
        """Ends the processes, and what they have forked."""
        self._threads.close()
        self._finalizer.detach()

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _count(self, scores: list[Score], lost: Lost | None) -> None:
        for score in scores:
            if score.event:
                self.events[score.event] += 1
                self.last_message[score.event] = score.message
            else:
                self._scored += 1
        self._lost += lost is not None
        if self._lost >= LOST_LIMIT and not self._scored:
            raise self._threads.error(
                f"{self._lost} scoring processes were lost before anything was scored, the last so: {lost.event}: {lost}"
            )


class _Threads:
    """A pool's threads and what they share with it. They do not hold the pool itself, which could not be dropped then."""

    def __init__(self, args: RewardArgs):
        self.args = args
        self.queue: SimpleQueue[tuple[Any, str] | None] = SimpleQueue()  # (key, item) for the threads, None for one to end
        self.done: SimpleQueue[tuple[list[tuple[Any, Score]], Lost | None]] = SimpleQueue()  # what they hand back
        self.begun = threading.Event()  # a process is ready, or a thread has failed
        self._threads: list[threading.Thread] = []
        self._failure: Exception | None = None
        self._closed = False
        self._first_calls: list[float] = []  # seconds that processes took for their first response
        self._suspects: deque[Task] = deque()  # of processes with an async function that were lost

    def __len__(self) -> int:
        return len(self._threads)

    def start_one(self) -> None:
        self._threads.append(threading.Thread(target=self._serve, name="scoring", daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        self._closed = True
        for _ in self._threads:
            self.queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a pool may be dropped in any
                thread.join()

    def raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def error(self, message: str) -> UserError:
        return UserError(f"{self.args.own_reward or 'scoring'}: {message}")

    def _serve(self) -> None:
        """One scoring process after the other, until the pool is closed."""
        bad_starts = 0
        try:
            while True:
                lost = self._use_one()
                bad_starts = bad_starts + 1 if lost else 0
                if bad_starts > BAD_STARTS or (lost and not self.begun.is_set()):
                    raise self.error(f"importing it does not work: {lost}")
        except _Closed:
            pass
        except Exception as error:
            self._failure = error
            self.begun.set()
            self.done.put(([], None))  # wakes the rank

    def _use_one(self) -> Lost | None:
        """A scoring process for as long as it lasts; returns how it was lost if it was never ready."""
        args = self.args
        limits = args.reward_memory_limit_gb, args.reward_cpu_limit
        spec = args.judge_spec(first=not self.begun.is_set()) if args.judge else args.reward if args.own_reward else None
        with ScoringProcess(spec, *limits, (*args.reward_env, *args.judge_env)) as process:
            try:
                kind = self._await_ready(process)
            except Lost as lost:
                return lost
            (self._score_at_once_by if kind == "async" else self._score_by)(process)
        return None

    def _await_ready(self, process: ScoringProcess) -> str:
        """Returns "async" for a function that works on many responses at once."""
        try:
            reply = process.answer(functools.partial(self._limit, process))
        except TimeoutError:
            raise self.error(f"the scoring process was not ready after {START_LIMIT} s") from None
        if "failed" in reply:
            raise self.error(reply["failed"])
        self.begun.set()
        return reply["ready"]

    def _score_by(self, process: ScoringProcess) -> None:
        """One response after the other, until the process is lost."""
        while (task := self.queue.get()) and not self._closed:
            key, item = task
            try:
                self.done.put(([(key, self._ask(process, item))], None))
            except Lost as lost:
                if lost.idle:  # the response has no part in it
                    self.queue.put(task)
                    self.done.put(([], lost))
                else:
                    self.done.put(([(key, self._score_of_lost(item, lost))], lost))
                return
        raise _Closed

    def _score_at_once_by(self, process: ScoringProcess) -> None:
        """As many responses at once as --reward-concurrency says, until the process is lost."""
        many = AtOnce(process, self.queue, self._suspects, self.args.reward_concurrency)
        try:
            while not self._closed and many.take(lambda: self._limit_of(many)):
                for key, reply in many.hear():
                    self.done.put(([(key, of_reply(reply, self._no_score()))], None))
        except Lost as lost:
            self._first_calls.append(many.first_answer)
            event = Score(None, event=lost.event, message=str(lost))
            self.done.put(([(key, event) for key in many.at_fault()], lost))
            return
        raise _Closed

    def _limit_of(self, many: AtOnce) -> float:
        """Seconds that a response of many may take: more while the first ones may import or load something."""
        is_known = many.first_answer or self.args.judge
        return self.args.reward_timeout + (0.0 if is_known else max(self._first_calls, default=FIRST_CALL))

    def _ask(self, process: ScoringProcess, item: str) -> Score:
        started = time.monotonic()
        try:
            reply = process.ask(item, functools.partial(self._limit, process))
        except TimeoutError:
            raise Lost("timeout", self._too_long(process)) from None
        if process.asked == 1:
            self._first_calls.append(time.monotonic() - started)
        if "failed" not in reply:
            return as_score(reply["value"])
        if self.args.own_reward or BUILT_IN[json.loads(item)["data_source"]] is code:  # programs fail in the sandbox, not here
            return Score(None, event="error", message=f"{reply['failed']:.500}")
        return wrong_answer(json.loads(item))

    def _score_of_lost(self, item: str, lost: Lost) -> Score:
        """An answer that keeps a built-in grader busy is wrong. Of a user's function nobody knows whose fault it is."""
        if self.args.own_reward or lost.event != "timeout":
            return Score(None, event=lost.event, message=str(lost))
        return wrong_answer(json.loads(item))

    def _limit(self, process: ScoringProcess) -> float:
        """Seconds that the process may take to get ready, or for its item."""
        if self._closed:
            raise _Closed
        if not process.asked:
            return START_LIMIT
        return self.args.reward_timeout + (max(self._first_calls, default=FIRST_CALL) if process.asked == 1 else 0.0)

    def _no_score(self) -> str:
        return f"no score after {self.args.reward_timeout:g} s (--reward-timeout)"

    def _too_long(self, process: ScoringProcess) -> str:
        message = self._no_score()
        if process.asked == 1:
            if (more := max(self._first_calls, default=FIRST_CALL)) >= 1:
                message += f" and {more:.3g} s for what a first call imports or loads, better done when the file is imported"
            self._first_calls.append(0.0)  # it was not that
        return message


def wrong_answer(item: dict) -> Score:
    """What a built-in grader gives for no answer: its lowest score."""
    function = BUILT_IN[item["data_source"]]
    return as_score(function(**item | {"solution_str": ""}))


def event_metrics(events: Mapping[str, int]) -> dict[str, int]:
    """reward/events/<kind>, whose counts are these."""
    return {f"reward/events/{kind}": events.get(kind, 0) for kind in EVENTS}


class ScoringEvents:
    """Counts of the responses that could not be scored so far, by kind, over all ranks that score."""

    def __init__(self, pool: ScoringPool, ranks: dist.Ranks):
        self._pool, self._ranks = pool, ranks

    def state(self) -> dict[str, int]:
        """The counts. A collective."""
        counts = dist.all_reduce_sum(torch.tensor([float(self._pool.events[kind]) for kind in EVENTS]))
        return {kind: int(count) for kind, count in zip(EVENTS, counts, strict=True)}

    def restore(self, state: dict[str, int]) -> None:
        self._pool.events.update(state if self._ranks.is_main else {})

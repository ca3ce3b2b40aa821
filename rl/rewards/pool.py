"""Scores for responses: the pool that runs the built-in verifiers (rl/rewards/verifiers.py) or the user's own function.

They run in separate processes, so that a response that cannot be scored (the function hangs, raises, returns no finite number,
uses too much memory or ends its process) is counted as an event and never stops the run: the response is left out of training.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rl.errors import UserError
from rl.printable import one_line, pass_on
from rl.ranges import LARGEST_FLOAT
from rl.rewards.args import RewardArgs
from rl.rewards.outages import OUT, LastScored, Outages
from rl.rewards.verifiers import BUILT_IN, HARMLESS, code, verifier_name

MEMORY = 32 << 30  # bytes that a scoring process may allocate
LAST_WORDS = 5  # seconds to pass on what was printed
JOB = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
EVENTS = ("timeout", "error", "bad_value", "died", "image", OUT)  # image: an image of the prompt is damaged


@dataclass(frozen=True)
class Score:
    score: float | None  # None if an event kept the response from being scored
    extra: dict[str, float] = field(default_factory=dict)
    event: str | None = None  # one of EVENTS
    message: str = ""  # of the event
    pred: str | None = None  # the answer that the grader found, for the majority vote of a validation

    @property
    def error(self) -> str | None:
        """The event with its message; None without an event."""
        return f"{self.event}: {self.message}" if self.event else None


GREEDY = "the greedy response: "  # begins the error of responses whose baseline could not be scored


def event_of(error: str) -> str:
    """Return the event of a response's error (`Score.error`)."""
    return error.removeprefix(GREEDY).partition(":")[0]


class ScoringEvents:
    """The number of responses that could not be scored so far, by kind: those of the steps, and those of validations."""

    def __init__(self):
        self._counts: Counter[str] = Counter()

    def add(self, errors: Iterable[str]) -> None:
        """Count the responses with these errors (`Score.error`)."""
        self._counts.update(map(event_of, errors))

    def metrics(self) -> dict[str, int]:
        """Return reward/events/<kind>."""
        return {f"reward/events/{kind}": self._counts[kind] for kind in EVENTS}

    def state(self) -> dict[str, int]:
        return dict(self._counts)

    def restore(self, state: dict[str, int]) -> None:
        self._counts = Counter(state)


def as_score(value: Any) -> Score:
    """Return a reward function's return value as a Score; anything but a finite fp32 number is a bad_value event."""
    is_dict = isinstance(value, dict)
    score = value.get("score") if is_dict else value
    if not (_is_number(score) and abs(score) <= LARGEST_FLOAT):
        fault = 'which has no finite number under "score"' if is_dict else "not a finite number of fp32"
        return Score(None, event="bad_value", message=one_line(f"the reward function returned {value!r:.100}, {fault}"))
    extra = {name: float(its) for name, its in value.items() if name != "score" and _is_number(its)} if is_dict else {}
    pred = value.get("pred") if is_dict else None
    return Score(float(score), extra, pred=None if pred is None else " ".join(str(pred).split()))


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def plain(value: Any) -> Any:
    """Return a numpy scalar or array, bytes or a date of a parquet row as plain Python, for JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def overlong_penalty(length: int, max_response_length: int, buffer_len: int, factor: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in [-factor, 0]: 0 up to max_response_length -
    buffer_len tokens, falling linearly from there."""
    if buffer_len <= 0:
        return 0.0
    over = length - (max_response_length - buffer_len)
    return min(-over / buffer_len * factor, 0.0)


def can_score(source: str, args: RewardArgs) -> bool:
    """Return whether responses to prompts of this data_source can be scored."""
    return bool(args.own_reward) or verifier_name(source, args.reward) is not None


def check_sources(sources: dict[str, str], args: RewardArgs) -> None:
    """Raise UserError for a data_source without a verifier (--reward serves all), and for programs if the sandbox is missing or
    not secure. sources: data_source -> its first place in the data."""
    for source, where in sources.items():
        if not can_score(source, args):
            raise UserError(
                f"{where}: there is no built-in reward for data_source {source!r}. Give your own with --reward "
                f"file.py:function, or use one of: {', '.join(BUILT_IN)}."
            )
    if not args.own_reward and any(BUILT_IN[verifier_name(source, args.reward)] is code for source in sources):
        from program_grader import sandbox  # late: only programs need it

        try:
            sandbox.check()
        except sandbox.NoSandbox as error:
            raise UserError(str(error)) from None


class ScoringPool(contextlib.AbstractContextManager):
    """Background scoring of (key, response) items: `submit` never blocks; `poll` and `wait` return finished scores.

    A process (rl/rewards/host.py) with --reward-workers scoring processes does the work. It imports a user's function right
    away, so that a file that cannot be imported is a UserError at the start. All end with the pool or with this process.
    """

    def __init__(self, args: RewardArgs):
        self.args = args
        self.events: Counter[str] = Counter()
        self.last_message: dict[str, str] = {}  # by kind of event
        self.tape: Any = None  # with --record-env or --from-tape: rl.rewards.tape.Tape
        self.pending = 0  # responses whose score has not been returned
        self._count = 0  # responses given to the host so far
        self._keys: dict[int, Any] = {}  # number of a response in the host -> its key
        self._items: dict[Any, dict] = {}  # key of a response that has no final score, or LastScored -> its arguments
        self._outages = Outages(args.outage_timeout, args.own_reward or "the grader", self._send)
        self._done: SimpleQueue[tuple[Any, Score] | None] = SimpleQueue()  # None: look at _failure
        self._unwritten: SimpleQueue[bytes] = SimpleQueue()  # lines for the host
        self._is_ready = threading.Event()
        self._failure: UserError | None = None
        self._host: subprocess.Popen | None = None
        if args.own_reward and not args.scores_environments:
            self._start()
            self._is_ready.wait()
            self._raise_failure()

    def submit(
        self, key: Any, data_source: str, text: str, ground_truth: Any, extra_info: dict | None = None, **further: Any
    ) -> None:
        """Queue a response for scoring. further: `prompt` (messages or text), `step`, `split`, for functions that name them."""
        self._raise_failure()
        item = {"data_source": data_source, "solution_str": text, "ground_truth": ground_truth, "extra_info": extra_info}
        if self.args.own_reward:
            item |= {name: further.get(name) for name in self._takes}
        else:
            check_sources({data_source: f"response {key}"}, self.args)
            item["data_source"] = verifier_name(data_source, self.args.reward)
            verifier = BUILT_IN[item["data_source"]]
            if verifier in HARMLESS:
                return self.hand_back(key, as_score(verifier(data_source, text, ground_truth)))
            item |= {"seconds_in_all": self.args.reward_timeout} if verifier is code else {}
        if self.tape and (reply := self.tape.score(key, item)):
            return self.hand_back(key, self._score(item, reply))
        if not self._host:
            self._start()
        self._items[key] = item
        self._send(key)
        self.pending += 1

    def hand_back(self, key: Any, score: Score) -> None:
        """Accept a score computed elsewhere; `poll` returns it with the others."""
        self._done.put((key, score))
        self.pending += 1

    def poll(self) -> list[tuple[Any, Score]]:
        """Return the responses scored since the last call, as (key, score)."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> list[tuple[Any, Score]]:
        """Return what `poll` returns, but wait up to `timeout` seconds for a first score."""
        self._raise_failure()
        done: list[tuple[Any, Score]] = []
        limit = timeout
        with contextlib.suppress(Empty):
            while len(done) + (0 if self._outages.is_one else self._outages.waiting) < self.pending:
                found = self._done.get(timeout=limit)
                self._raise_failure()
                limit = 0.0
                key, score = found
                if item := self._items.get(key):  # otherwise it was handed back, and is final
                    source = item["data_source"]
                    if not score.event:
                        self._items[LastScored(source)] = item
                    done += self._outages.take(source, key, score)
                else:
                    done.append(found)
        nothing_comes = timeout > 0 and len(done) + self._outages.waiting == self.pending
        done += self._outages.look(nothing_comes)
        for key, score in done:
            self._items.pop(key, None)
            if score.event:
                self.events[score.event] += 1
                self.last_message[score.event] = score.message
        self.pending -= len(done)
        return done

    def close(self) -> None:
        """End the processes. Responses under way get no score."""
        if self._host and self._host.returncode is None:
            self._is_closed = True
            self._end_host()
            self._printer.join(LAST_WORDS)

    def __exit__(self, *_) -> None:
        self.close()

    # -- the host

    def _send(self, key: Any) -> None:
        self._count += 1
        self._keys[self._count] = key
        self._unwritten.put(f"{self._count} {json.dumps(self._items[key], default=plain)}\n".encode())

    def _start(self) -> None:
        spec = self.args.reward if self.args.own_reward else ""
        limits = {"timeout": self.args.reward_timeout, "memory": MEMORY, "workers": self.args.reward_workers}
        settings = {"spec": spec, "weights": self.args.reward_weights} | limits
        command = [sys.executable, "-m", "rl.rewards.host", json.dumps(settings)]
        env = {name: value for name, value in os.environ.items() if not name.startswith(JOB)}
        root = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        self._host = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
        self._is_closed = False
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()
        shown = (self._host.stderr, "the reward function")
        self._printer = threading.Thread(target=pass_on, args=shown, daemon=True)
        self._printer.start()

    def _end_host(self) -> int:
        """End the host and everything in its process group. Return its exit code."""
        os.killpg(self._host.pid, signal.SIGKILL)  # not reaped, so no other process or group can have its number
        return self._host.wait()

    def _write(self) -> None:
        """Send responses to the host, in a thread."""
        with contextlib.suppress(OSError):  # it has ended; `_read` notices
            while True:
                self._host.stdin.write(self._unwritten.get())
                self._host.stdin.flush()

    def _read(self) -> None:
        """Receive replies from the host, in a thread, until it ends."""
        try:
            for line in self._host.stdout:
                number, _, reply = line.partition(b" ")
                reply = json.loads(reply)
                if int(number):
                    key = self._keys.pop(int(number))
                    if self.tape:
                        self.tape.write_score(key, self._items[key], reply)
                    self._done.put((key, self._score(self._items[key], reply)))
                elif "failed" in reply:
                    self._fail(reply["failed"])
                else:
                    self._takes = reply["takes"]
                    self._is_ready.set()
            if not self._is_closed:
                self._end_host()
                self._fail("the process that starts the scoring processes has ended")
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _score(self, item: dict, reply: dict) -> Score:
        """Return the score of a response. An answer that a built-in grader cannot finish grading gets the score of an empty
        one, its lowest. A program fails inside the sandbox, so an error of the grader itself is not the program's fault."""
        if "failed" not in reply:
            return as_score(reply["value"])
        event = reply["event"] if reply["event"] in EVENTS else "error"
        if not self.args.own_reward:
            verifier = BUILT_IN[item["data_source"]]
            if event == "timeout" or (event == "error" and verifier is not code):
                return as_score(verifier(**item | {"solution_str": ""}))
        message = reply["failed"] or f"no score after {self.args.reward_timeout:g} s (--reward-timeout)"
        return Score(None, event=event, message=str(message)[:500])

    def _fail(self, message: str) -> None:
        """End the run with this message."""
        self._failure = UserError(f"{self.args.own_reward or 'scoring'}: {message}")
        self._is_ready.set()
        self._done.put(None)  # wakes the rank

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure

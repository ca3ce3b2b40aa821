"""Scores for responses: the built-in verifiers, the user's own function, and the pool that runs them.

A verifier is a function (data_source, solution_str, ground_truth, extra_info) -> float, or a dict with "score" and further
numbers: verl's signature. `--reward file.py:function` replaces the built-in choice by `data_source`.

The pool runs them in processes of their own, so that a response that cannot be scored - the function hangs, raises, returns
no finite number, eats the memory, dies - becomes a score of 0 and a counted event, never a stuck run. The worker is
rl/reward_worker.py; what passes between is JSON, nothing is pickled.
"""

import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.errors import UserError


@dataclass
class RewardArgs:
    reward: str | None = None
    """Your own reward function, as path/to/file.py:function, called with (data_source, solution_str, ground_truth,
    extra_info); returns a number, or a dict with "score" and further numbers that become metrics."""
    reward_timeout: float = 10.0
    """Seconds to score one response; one that takes longer gets 0 and is counted."""
    reward_workers: int = 1
    """Processes that score, on each rank."""
    reward_memory_limit_gb: float = 4.0
    """Address space of each scoring process."""
    overlong_buffer_len: int = 0
    """DAPO: the last so many tokens of the response budget are penalised, linearly; 0 turns it off."""
    overlong_penalty_factor: float = 1.0
    """DAPO: the penalty at the very end of the budget."""


@dataclass(frozen=True)
class Score:
    score: float
    extra: dict[str, float] = field(default_factory=dict)
    event: str | None = None  # "timeout", "error", "bad_value" or "died": why there is no real score
    message: str = ""


EVENTS = ("timeout", "error", "bad_value", "died")

# ---------------------------------------------------------------------------------------------- built-in verifiers


def gsm8k(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the last "#### number" within the last 300 characters is the ground truth, else 0 (verl's strict method)."""
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str[-300:])
    clean = lambda text: str(text).replace(",", "").replace("$", "")  # noqa: E731
    return float(bool(found) and clean(found[-1]) == clean(ground_truth))


def gsm8k_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the last number of the response is the ground truth, else 0."""
    found = [n.rstrip(".,").replace(",", "") for n in re.findall(r"-?[0-9][0-9.,]*", solution_str)]
    return float(bool(found) and found[-1] == str(ground_truth).replace(",", "").replace("$", ""))


def math_verify(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    r"""1 if the last \boxed{} (or the line "Answer: ...") equals the ground truth as mathematics, else 0 (math-verify)."""
    from math_verify import parse, verify

    lines = re.findall(r"(?im)^\s*answer\s*:\s*(.+?)\s*$", solution_str)
    answer = solution_str if r"\boxed" in solution_str else rf"\boxed{{{lines[-1].strip('$ ')}}}" if lines else ""
    # No time limits of its own: they are signals, and the pool has one.
    gold = parse(rf"\boxed{{{ground_truth}}}", parsing_timeout=None)
    return float(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))


def math_dapo(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """math_verify as +1 / -1, DAPO's scale (arXiv 2503.14476); acc stays 1 / 0."""
    right = math_verify(data_source, solution_str, ground_truth)
    return {"score": 2 * right - 1, "acc": right}


def geo3k(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    r"""0.9 accuracy + 0.1 format; the format is <think>...</think>...\boxed{...}..., over the whole response."""
    right = math_verify(data_source, solution_str, ground_truth) if r"\boxed" in solution_str else 0.0
    well_formed = float(bool(re.fullmatch(r"(?s)\s*<think>.*</think>.*\\boxed\{.*\}.*", solution_str)))
    return {"score": 0.9 * right + 0.1 * well_formed, "acc": right, "format": well_formed}


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the response, stripped, is the ground truth."""
    return float(solution_str.strip() == str(ground_truth).strip())


BUILT_IN: dict[str, Callable] = {
    "demo": exact,
    "openai/gsm8k": gsm8k,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "lighteval/MATH": math_verify,
    "DigitalLearningGmbH/MATH-lighteval": math_verify,
    "HuggingFaceH4/MATH-500": math_verify,
    "math": math_verify,
    "math_dapo": math_dapo,
    "aime": math_dapo,
    "aime24": math_dapo,
    "aime25": math_dapo,
    "hiyouga/geometry3k": geo3k,
    "geo3k": geo3k,
}
# A few string operations that cannot hang: scored at once. Everything else, the user's function first of all, goes to the pool.
HARMLESS = {exact, gsm8k, gsm8k_flexible}


def overlong_penalty(length: int, max_response_length: int, buffer_len: int, factor: float) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13), in [-factor, 0]: 0 up to max_response_length - buffer_len tokens,
    then falling linearly."""
    over = length - (max_response_length - buffer_len)
    return min(-over / buffer_len * factor, 0.0)


def check_sources(sources: dict[str, str], args: RewardArgs) -> None:
    """sources: data_source -> where it first stands. Raises UserError for one that no verifier serves, or a --reward that
    cannot be loaded."""
    if args.reward:
        _try_import(args.reward)
        return
    for source, where in sources.items():
        if source not in BUILT_IN:
            raise UserError(
                f"{where}: there is no built-in reward for data_source {source!r}. Give your own with --reward "
                f"file.py:function, or use one of: {', '.join(BUILT_IN)}."
            )


def _try_import(spec: str) -> None:
    """Imports the user's function in a worker, as the pool will, and passes its complaint on."""
    path, _, function = spec.rpartition(":")
    if not path or not function:
        raise UserError(f"--reward {spec}: write it as path/to/file.py:function.")
    if not Path(path).is_file():
        raise UserError(f"--reward {spec}: there is no file {path}.")
    worker = _Worker(spec, memory_limit_gb=0)
    try:
        reply = worker.read(timeout=60)
    finally:
        worker.kill()
    if reply is None:
        raise UserError(f"--reward {spec}: importing the file took over 60 s or ended the process.")
    if "failed" in reply:
        raise UserError(f"--reward {spec}: {reply['failed']}")


# ------------------------------------------------------------------------------------------------------- the pool


class _Worker:
    """One scoring process in a session of its own, so that what it forks can be killed with it."""

    def __init__(self, spec: str | None, memory_limit_gb: float):
        command = [sys.executable, "-m", "rl.reward_worker", spec or "", str(memory_limit_gb), str(os.getpid())]
        root = str(Path(__file__).resolve().parent.parent)
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True)
        self.item: tuple[Any, dict] | None = None  # what it works on
        self.ready = False  # it has said that it is
        self.started = time.monotonic()  # when it was started or got its item
        self._buffer = b""

    def send(self, key: Any, item: dict) -> None:
        self.item, self.started = (key, item), time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # dead: the reader meets the end of its output
            self.process.stdin.write(json.dumps(item).encode() + b"\n")
            self.process.stdin.flush()

    def read(self, timeout: float) -> dict | None:
        """The next line it prints; None if there is none in time or the process has ended."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 1 << 16) if readable else b""
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    @property
    def has_output(self) -> bool:
        return b"\n" in self._buffer or bool(select.select([self.process.stdout], [], [], 0)[0])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class ScoringPool:
    """Scores (key, response) items in the background; `submit` never blocks, `poll` and `wait` hand back what is done."""

    def __init__(self, args: RewardArgs):
        self.args = args
        self.events: Counter[str] = Counter()
        self._queue: deque[tuple[Any, dict]] = deque()
        self._done: list[tuple[Any, Score]] = []
        self._workers: list[_Worker] = []

    def submit(self, key: Any, data_source: str, text: str, ground_truth: Any, extra_info: dict | None = None) -> None:
        function = None if self.args.reward else BUILT_IN[data_source]
        if function in HARMLESS:
            self._done.append((key, Score(function(data_source, text, ground_truth))))
            return
        item = {
            "data_source": data_source,
            "solution_str": text,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        }
        self._queue.append((key, json.loads(json.dumps(item, default=_plain))))
        self._drive()

    @property
    def pending(self) -> int:
        return len(self._queue) + sum(worker.item is not None for worker in self._workers) + len(self._done)

    def poll(self) -> list[tuple[Any, Score]]:
        """What has been scored since the last call."""
        self._drive()
        done, self._done = self._done, []
        return done

    def wait(self, timeout: float) -> list[tuple[Any, Score]]:
        """Like poll, but sleeps up to `timeout` seconds until there is something."""
        deadline = time.monotonic() + timeout
        while not (done := self.poll()) and self.pending and (left := deadline - time.monotonic()) > 0:
            outputs = [worker.process.stdout for worker in self._workers]
            select.select(outputs, [], [], min(left, 0.05))
        return done

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _drive(self) -> None:
        """Collects answers, ends what is late or dead, and gives idle workers the next item."""
        for worker in list(self._workers):
            if worker.has_output:
                reply = worker.read(timeout=1.0)
                if reply is None:
                    self._lose(worker, "died", "the scoring process ended")
                elif not worker.ready:
                    worker.ready = True
                else:
                    self._finish(worker, reply)
            elif worker.item and worker.ready and time.monotonic() - worker.started > self.args.reward_timeout:
                self._lose(worker, "timeout", f"no score after {self.args.reward_timeout} s")
            elif not worker.ready and time.monotonic() - worker.started > 60:
                raise UserError("a scoring process did not start within 60 s")
        while self._queue and len(self._workers) < min(self.args.reward_workers, len(self._queue)):
            self._workers.append(_Worker(self.args.reward, self.args.reward_memory_limit_gb))
        for worker in self._workers:
            if worker.ready and worker.item is None and self._queue:
                worker.send(*self._queue.popleft())

    def _finish(self, worker: _Worker, reply: dict) -> None:
        key, _ = worker.item
        worker.item = None
        if "failed" in reply:
            self._record(key, Score(0.0, event="error", message=reply["failed"]))
        else:
            self._record(key, as_score(reply["value"]))

    def _lose(self, worker: _Worker, event: str, message: str) -> None:
        worker.kill()
        self._workers.remove(worker)
        if worker.item:
            self._record(worker.item[0], Score(0.0, event=event, message=message))

    def _record(self, key: Any, score: Score) -> None:
        if score.event:
            self.events[score.event] += 1
            count = self.events[score.event]
            if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...: seen, and not a flood
                print(f"reward {score.event} number {count}, scored 0: {score.message}", file=sys.stderr, flush=True)
        self._done.append((key, score))


def as_score(value: Any) -> Score:
    """What a reward function returned, as a Score; anything but a finite number is a bad_value event."""
    extra = {}
    if isinstance(value, dict):
        extra = {k: float(v) for k, v in value.items() if k != "score" and _is_number(v)}
        value = value.get("score")
    if not _is_number(value):
        return Score(0.0, event="bad_value", message=f"the reward function returned {value!r}, not a finite number")
    return Score(float(value), extra)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """numpy scalars and arrays, bytes and dates of a parquet row, as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)

"""The watchdog, which ends a job that hangs, after a report of what every rank waits for.

    with doing("samples of the generators"):      what the main thread does; the timers of the ledger call this themselves
    waits_for("room in the ring", True)           what the rank waits for while it does something else
    progress()                                    something was done
    show("ring", text)                            another line for the report

A thread of each rank watches whether its main thread makes progress. It also runs while the main thread is in a collective,
which releases Python's lock. A rank without progress for --hang-timeout raises the alarm in torchrun's store, and every rank
answers there with its part of the report. The rank that raised the alarm prints all parts in one piece and names the ranks that
did not answer; then every rank exits with EXIT_CODE. torchrun's own exit code is 1, as for every failure; its table has those
of the ranks.

A new timed phase, a record, a bucket of the weights and a micro-batch count as progress. Waiting does not, however often a loop
wakes up to look. Seconds in which the process was stopped do not count.

Left out: a main thread that keeps Python's lock forever, in C. Its watchdog cannot report; the other ranks name it.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from torch.distributed import DistError, HashStore, Store

from rl.ranges import MayChange, Range

EXIT_CODE = 75  # of every rank of a job that hung: EX_TEMPFAIL of sysexits.h
FAILED = "failed/cause"  # key of the store: the message of the first rank that failed; only that rank reports
ENDED = "ended"  # with a rank, a key of the store: that rank has come to its end
ALARM = "watchdog/alarm"  # key of the store: the rank that calls for a report
ANSWER_SECONDS = 10.0  # until a rank that has not answered the alarm counts as silent


@dataclass
class WatchdogArgs:
    """Failure detection: when a job that hangs, or has lost a rank, ends."""

    hang_timeout: MayChange[Annotated[float, Range(at_least=0, at_most=1_000_000_000)]] = 1800.0
    """Seconds that a rank may go without progress. Then every rank reports what it waits for, and the job ends. Must exceed the
    longest step and the initial download of the model. 0 disables it."""
    node_timeout: MayChange[Annotated[float, Range(at_least=0, at_most=1_000_000_000)]] = 20.0
    """Seconds without a sign of life after which a rank or a node counts as lost. The job ends and names it. 0 disables it."""


# The activity of this process's main thread, which writes it; the watchdog's thread reads it
_open: list[tuple[str, float]] = []  # the blocks that it is in, outermost first, with their start times
_standing: dict[str, float] = {}  # what else it waits for -> since when
_facts: dict[str, Callable[[], str]] = {}
_groups: dict[str, Callable[[], tuple[int, str]]] = {}
_left = "the start"  # the last block that it left
_done = 0  # the count of progress
_done_at = time.monotonic()  # when it last grew
_name = ""  # this process's name in reports
_watchdog: "Watchdog | None" = None
speaking = threading.Lock()  # held while a thread prints this process's last message: another one may do so too, and end it


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Name what the main thread does or waits for in the block. Other threads are ignored: they would mix up the order."""
    global _left
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        _open.append((what, time.monotonic()))
    try:
        yield
    finally:
        if is_main:
            _left, _ = _open.pop()


def waits_for(what: str, still: bool) -> None:
    """Note whether the rank waits for something while it does something else."""
    if still:
        _standing.setdefault(what, time.monotonic())
    else:
        _standing.pop(what, None)


def progress() -> None:
    """Note that something was done for which others may have waited."""
    global _done, _done_at
    _done = _done + 1
    _done_at = time.monotonic()


def show(name: str, text: Callable[[], str]) -> None:
    """Let a report include the result of `text`, which is then called in another thread."""
    _facts[name] = text


def show_group(name: str, last: Callable[[], tuple[int, str]]) -> None:
    """Let a report include the last collective that this rank began in a process group: its number and its name."""
    _groups[name] = last


def start(name: str, rank: int, world_size: int, timeout: float, store: Store) -> None:
    """Begin to watch this process."""
    global _watchdog
    rename(name)
    _watchdog = Watchdog(rank, world_size, timeout, store)


def rename(name: str) -> None:
    """Name this process in reports."""
    global _name
    _name = name
    if _watchdog:
        _watchdog.sign()


def end_stuck_launcher(seconds: float) -> None:
    """Kill this rank's torchrun if it has no living rank this many seconds from now: with a c10d rendezvous it waits a minute
    for a store that does not answer, and ignores its ranks. A healthy torchrun has ended by then, or has restarted them."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    ranks = f'for rank in $(cat /proc/{launcher}/task/*/children); do grep -qs "^State:.[^ZX]" /proc/$rank/status && exit; done'
    subprocess.Popen(["sh", "-c", f"sleep {seconds:g}; {ranks}; kill -KILL {launcher}"], start_new_session=True)


def first_to_fail(store: Store, cause: str) -> bool:
    """Store the cause if no rank has failed before. Return whether none had. cause: must include this rank's name, since
    otherwise two ranks may both believe that they were the first."""
    return store.compare_set(FAILED, "", cause).decode() == cause


class Watchdog:
    """The thread of one rank. store: shared by all ranks, over a separate connection, since waits would block a common one."""

    def __init__(self, rank: int, world_size: int, timeout: float, store: Store):
        self.rank = rank
        self.ranks = range(world_size)
        self.timeout = timeout
        self.store = store
        self.tick = min(1.0, timeout / 10)
        self.idle = 0.0  # seconds without progress of the main thread, counted by this thread's looks
        self.sign()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def sign(self) -> None:
        self.store.set(f"watchdog/who/{self.rank}", json.dumps([_name, f"process {os.getpid()} on {platform.node()}"]))

    def _watch(self) -> None:
        seen = _done
        hangs = False
        while not self._alarmed():
            if hangs := self.idle > self.timeout:
                break
            time.sleep(self.tick)
            self.idle = self.idle + self.tick if seen == _done else 0.0
            seen = _done
        end = threading.Timer(3 * ANSWER_SECONDS, os._exit, (EXIT_CODE,))  # in case anything goes wrong with the report
        end.name = "watchdog's end"
        end.start()
        speaking.acquire()  # never released: if a rank ends before the report, the main thread loses a connection
        speaks = hangs and self._raise_alarm()
        answer = self._answer()
        self.store.set(f"watchdog/answer/{self.rank}", json.dumps(answer))
        if speaks:
            answers, silent = self._collect()
            print(report(self.timeout, answers, silent), file=sys.stderr, flush=True)
            self.store.set("watchdog/reported", "")
        else:
            with contextlib.suppress(DistError):
                self.store.wait(["watchdog/reported"], timedelta(seconds=2 * ANSWER_SECONDS))
        os._exit(EXIT_CODE)

    def _alarmed(self) -> bool:
        try:
            return self.store.check([ALARM])
        except DistError:  # torchrun's store is lost: this rank continues to watch itself
            self.store = HashStore()
            self.ranks = [self.rank]
            return False

    def _raise_alarm(self) -> bool:
        """Raise the alarm, or if another rank failed before, wait for its. Return whether this rank prints the report."""
        if first_to_fail(self.store, f"{_name} has made no progress for {self.timeout:g} s (--hang-timeout)"):
            self.store.set(ALARM, _name)
            return True
        speaking.release()  # the main thread may have to print that failure for its node
        with contextlib.suppress(DistError):
            self.store.wait([ALARM], timedelta(seconds=ANSWER_SECONDS))
        speaking.acquire()
        return False

    def _answer(self) -> dict:
        now = time.monotonic()
        blocks = " > ".join(f"{what} ({now - since:.0f} s)" for what, since in list(_open))
        return {
            "name": _name,
            "place": f"rank {self.rank}, process {os.getpid()} on {platform.node()}",
            "idle": now - _done_at,
            "in": blocks or f"the code after {_left}",
            "waits": [f"{what} ({now - since:.0f} s)" for what, since in list(_standing.items())],
            "collectives": {name: found for name, last in _groups.items() if isinstance(found := _ask(last), tuple)},
            "facts": {name: _ask(text) for name, text in _facts.items()},
            "stacks": stacks(),
        }

    def _collect(self) -> tuple[list[dict], list[str]]:
        """Return the answers in rank order, and a line about each rank that gave none."""
        deadline = time.monotonic() + ANSWER_SECONDS
        answers = {}
        while len(answers) < len(self.ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
            for rank in self.ranks:
                if rank not in answers and self.store.check([f"watchdog/answer/{rank}"]):
                    answers[rank] = json.loads(self.store.get(f"watchdog/answer/{rank}"))
        return [answers[rank] for rank in sorted(answers)], [self._about(rank) for rank in self.ranks if rank not in answers]

    def _about(self, rank: int) -> str:
        if not self.store.check([f"watchdog/who/{rank}"]):
            return f"rank {rank} is silent: it has not begun to join."
        name, where = json.loads(self.store.get(f"watchdog/who/{rank}"))
        if self.store.check([f"{ENDED}/{rank}"]):
            return f"{name} has come to its end."
        return f"{name} is silent: its {where} does not answer."


def _ask(question: Callable[[], str | tuple[int, str]]) -> str | tuple[int, str]:
    try:
        return question()
    except Exception as error:  # a report without this line is better than none
        return f"unknown ({error})"


def report(timeout: float, answers: list[dict], silent: list[str]) -> str:
    """Return the report's text. answers: in rank order. silent: a line about each rank that gave none."""
    by_time = sorted(answers, key=lambda answer: -answer["idle"])
    lines = ["", f"==== The job hangs: {by_time[0]['name']} has made no progress for {timeout:g} s (--hang-timeout). ===="]
    lines += [*silent, *_apart(answers)]
    lines.append("All ranks, the longest without progress first:")
    for answer in by_time:
        waits = "".join(f"; waits for {what}" for what in answer["waits"])
        lines.append(f"  {answer['name']}: for {answer['idle']:.0f} s, in {answer['in']}{waits}")
    for answer in answers:
        lines += ["", f"---- {answer['name']} ({answer['place']})"]
        last = [f"{number} of {group}, {what}" for group, (number, what) in answer["collectives"].items() if number]
        facts = answer["facts"] | {"last collective": "; ".join(last)}
        lines += [f"{name}: {text}" for name, text in facts.items() if text] + [answer["stacks"]]
    ranks = f"{len(answers)} of {len(answers) + len(silent)} ranks"
    return "\n".join([*lines, f"==== End of the report: {ranks}. They exit with {EXIT_CODE}, torchrun itself with 1. ====", ""])


def _apart(answers: list[dict]) -> Iterator[str]:
    """Yield a line for each process group in which some ranks have begun a collective that others have not reached."""
    for group in dict.fromkeys(group for answer in answers for group in answer["collectives"]):
        at = {answer["name"]: answer["collectives"][group] for answer in answers if group in answer["collectives"]}
        last, what = max(at.values())
        if behind := [f"{name} has not (it was in {number})" for name, (number, _) in at.items() if number < last]:
            there = " and ".join(name for name, (number, _) in at.items() if number == last)
            yield f"{there} came to collective {last} of {group}, {what}; {', '.join(behind)}"


def stacks() -> str:
    """Return the Python stacks of this process's threads except the watchdog's, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = names.get(ident, "a thread")
        if not name.startswith("watchdog"):
            lines.append(f"stack of {name}, innermost last:")
            lines += [f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in traceback.extract_stack(frame)]
    return "\n".join(lines)

"""A rank's environments: each episode has a process, and its answers are read between two decoding steps.

Nothing here waits for an environment. If one hangs, dies, raises or returns a wrong value, that is an event of its own episode,
of the kinds in rl/rewards/score.py. The processes are forks of a warm one, rl/environments/worker.py.
"""

import contextlib
import json
import math
import resource
import secrets
import selectors
import socket
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from rl import printable
from rl.environments.args import EnvironmentArgs
from rl.environments.gateway import Gateway, read_secret
from rl.environments.worker import LARGEST
from rl.errors import UserError
from rl.rewards import descendants
from rl.rewards.environment import check_passed
from rl.rewards.score import plain

START_LIMIT = 120  # seconds to import the tokenizer and the user's file; also the limit to fork an episode's process
REPLY_LIMIT = 1 << 26  # bytes of one answer
EVENTS = ("error", "bad_value", "timeout")  # that an episode's process may answer with
SHAPES = {  # of the answers to each question: name -> types
    "reset": {"prompt": (list, type(None))},
    "step": {"ids": list, "reward": (float, type(None)), "done": bool, "calls": int, "malformed": int},
    "end": {"reward": (float, type(None))},
}


@dataclass
class Place:
    """An episode's process."""

    key: Hashable
    fork: int  # its number among all forks
    socket: socket.socket
    unwritten: bytes = b""
    unread: bytes = b""
    asked: str | None = None  # the last question
    number: int = 0  # of the last question
    has_ended: bool = False


class Environments:
    """The processes of a rank's environments, by keys that the caller chooses."""

    def __init__(
        self, args: EnvironmentArgs, model: str, end_tokens: set[int], vocabulary: int, trust_remote_code: bool = False
    ):
        """model: the path of its tokenizer; vocabulary: all ids in answers are below it."""
        self.args, self.vocabulary = args, vocabulary
        self._gateway: Gateway | None = None
        self._settings = {
            "spec": args.environment_spec,
            "are_tools": not args.env,
            "reward": args.reward if args.scores_environments else "",
            "agent": args.agent,
            "gateway": secrets.token_hex(16) if args.has_agent else "",
            "timeout": args.env_timeout,
            "model": model,
            "trust_remote_code": trust_remote_code,
            "end_tokens": sorted(end_tokens),
            "form": args.tool_format,
            "memory_gb": args.env_memory_limit_gb,
            "cpu_seconds": args.env_cpu_limit,
        }
        check_passed(args.reward_env)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one socket per episode
        self._forks = 0
        self._places: dict[Hashable, Place] = {}
        self._by_fork: dict[int, Place] = {}
        self._deadlines: dict[Hashable, float] = {}  # of the questions without an answer
        self._events: list[tuple[Hashable, dict]] = []
        self._start()

    # -- the warm process

    def _start(self) -> None:
        """Start the warm process and set `ready` to its first message: the "tools" (rl/data/tools.py), whether an environment
        "scores_at_end", and a "note" for the user. Raise UserError if the user's file cannot be used."""
        flag, value = self.args.environment_flag
        self._selector = selectors.DefaultSelector()
        self._orders = deque()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = self.args.reward_env
        nowhere = subprocess.DEVNULL
        self._process = descendants.start("rl.environments.worker", passed=passed, stdin=theirs, stdout=nowhere)
        theirs.close()
        self._finalizer = weakref.finalize(self, descendants.end, self._process)
        self._control.send(json.dumps(self._settings).encode())
        self._selector.register(self._control, selectors.EVENT_READ)
        self._control.settimeout(START_LIMIT)
        try:
            self.ready = json.loads(self._control.recv(LARGEST) or '{"failed": "its process ended"}')
        except OSError as error:
            self.ready = {"failed": f"its process is not ready: {error}"}
        if "failed" in self.ready:
            self._close()
            raise UserError(f"{flag} {value}: {self.ready['failed']}")
        self._control.setblocking(False)

    def check(self) -> None:
        """Raise UserError on a rank that generates if it lacks the secret of --serve-policy."""
        if self.args.serve_policy:
            read_secret()

    def serve(self, number: int) -> None:
        """Start the server that agents call, on the rank that leads engine `number`."""
        self._gateway = Gateway(self.args, self._settings["gateway"], number)

    def close(self) -> None:
        """End all processes, and let workers know that the run has ended."""
        if self._gateway:
            self._gateway.finish()
        self._close()
        if self._gateway:
            self._gateway.close()

    def _close(self) -> None:
        self._finalizer()
        for place in self._places.values():
            place.socket.close()
        self._places, self._by_fork, self._deadlines = {}, {}, {}
        self._control.close()
        self._selector.close()

    # -- episodes

    def begin(self, key: Hashable, row: dict, seed: int, own_seed: int, split: str = "train") -> None:
        """Fork an episode's process and ask it to reset. seed: for the user's reset; own_seed: for the process's random
        numbers; split: "train" or "val"."""
        if self._gateway:
            self._gateway.check()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._forks += 1
        self._orders.append(({"fork": self._forks}, theirs))
        place = self._places[key] = self._by_fork[self._forks] = Place(key, self._forks, ours)
        self._selector.register(ours, selectors.EVENT_READ, place)
        self.ask(key, "reset", row=row, seed=seed, own_seed=own_seed, split=split)
        self._order()

    def ask(self, key: Hashable, what: str, **item: Any) -> None:
        """Ask an episode's process to "reset", to "step" after the model's turn, or for the reward at an early "end"."""
        place = self._places[key]
        place.asked = what
        place.number = place.number + 1
        line = json.dumps({"do": what, "number": place.number} | item, default=plain)
        place.unwritten += line.encode() + b"\n"
        # There is no limit to the wait for a worker. A fork may wait for those ordered before it.
        queued = math.inf if self.args.serve_policy else START_LIMIT
        self._deadlines[key] = time.monotonic() + self.args.env_timeout + (queued if what == "reset" else 0)
        self._write(place)

    def end(self, key: Hashable) -> None:
        """End an episode's process."""
        if place := self._places.pop(key, None):
            self._deadlines.pop(key, None)
            if not place.has_ended:
                self._selector.unregister(place.socket)
            self._orders.append(({"kill": place.fork}, None))  # closing the socket may not end it
            place.socket.close()
            self._by_fork.pop(place.fork, None)
            self._order()

    def poll(self, wait: float = 0.0) -> list[tuple[Hashable, dict]]:
        """Return (key, answer) for each answer since the last call; wait up to `wait` seconds for one. An answer with "event"
        and "message" ends the episode."""
        self._order()
        due = min(self._deadlines.values(), default=math.inf) - time.monotonic()
        answers = []
        lost = False
        for entry, mask in self._selector.select(max(0.0, min(wait, due))):
            if entry.data is None:
                lost = not self._hear_of_ends()
                continue
            if entry.data.fork not in self._by_fork:  # this poll has already reported its end
                continue
            if mask & selectors.EVENT_WRITE:
                self._write(entry.data)
            if mask & selectors.EVENT_READ:
                answers += self._read(entry.data)
        if lost:
            self._lost()
        now = time.monotonic()
        for key in [key for key, deadline in self._deadlines.items() if deadline <= now]:
            self._fail(key, "timeout", f"no answer after {self.args.env_timeout:g} s (--env-timeout)")
        answers = answers + self._events
        self._events = []
        return answers

    def _fail(self, key: Hashable, event: str, message: str) -> None:
        self.end(key)
        self._events.append((key, {"event": event, "message": printable.one_line(f"the environment: {message}")}))

    def _write(self, place: Place) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # if the process has ended, its parent reports how
            while place.unwritten:
                place.unwritten = place.unwritten[place.socket.send(place.unwritten) :]
        if not place.has_ended:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if place.unwritten else 0)
            if self._selector.get_key(place.socket).events != wanted:
                self._selector.modify(place.socket, wanted, place)

    def _read(self, place: Place) -> list[tuple[Hashable, dict]]:
        """Return the key and the answer that has arrived, if any."""
        data = b""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            data = place.socket.recv(1 << 20)
        is_first = not place.unread
        place.unread += data
        if not data:
            self._selector.unregister(place.socket)
            place.has_ended = True
            return []
        if b"\n" not in place.unread and len(place.unread) < REPLY_LIMIT:
            if is_first and place.key in self._deadlines:  # the rest had to wait for room in the socket
                self._deadlines[place.key] = time.monotonic() + self.args.env_timeout
            return []
        line, _, place.unread = place.unread.partition(b"\n")
        answer = self._checked(place, line)
        if answer is None or place.unread:
            self._fail(place.key, "bad_value", "it wrote into the socket of its process")
            return []
        self._deadlines.pop(place.key, None)
        if "event" in answer:
            self._fail(place.key, answer["event"], answer["message"])
            return []
        return [(place.key, answer | {"asked": place.asked})]

    def _checked(self, place: Place, line: bytes) -> dict | None:
        """Return the answer; None if our own code cannot have written it: the user's code can write to any open file."""
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            answer = json.loads(line)
            if answer["number"] != place.number or place.key not in self._deadlines:
                return None
            if "event" in answer:
                return answer if answer["event"] in EVENTS and isinstance(answer["message"], str) else None
            shape = SHAPES[place.asked]
            if not all(isinstance(answer.get(name), kinds) for name, kinds in shape.items()):
                return None
            ids = answer.get("prompt") or answer.get("ids") or []
            is_finite = math.isfinite(answer.get("reward") or 0.0) and math.isfinite(answer["seconds"])
            if is_finite and all(type(token) is int and 0 <= token < self.vocabulary for token in ids):
                return answer
        return None

    def _order(self) -> None:
        """Send the warm process as many orders as it has room for."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._orders:
                order, theirs = self._orders[0]
                data = [json.dumps(order).encode()]
                socket.send_fds(self._control, data, [theirs.fileno()] if theirs else [])
                self._orders.popleft()
                if theirs:
                    theirs.close()

    def _hear_of_ends(self) -> bool:
        """Read the warm process's reports of processes that have ended. Return False if the warm process itself has ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = self._control.recv(LARGEST)
                except ConnectionError:
                    data = b""
                if not data:
                    return False
                message = json.loads(data)
                if place := self._by_fork.get(message["ended"]):
                    over_cpu = "no answer within the CPU time of --env-cpu-limit"
                    failed = message.get("failed")
                    ending = ("died", failed) if failed else descendants.ending(message["code"], "its process", over_cpu)
                    self._fail(place.key, *ending)
        return True

    def _lost(self) -> None:
        """Start another warm process, because the last one has ended, and all its forks with it."""
        for key in [*self._places]:
            self._fail(key, "died", "the process that it was forked from was ended")
        self._close()
        self._start()

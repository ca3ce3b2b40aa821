"""The scoring processes of a rank: `python -m user_processes.scoring`, started by rl/rewards/scorers.py.

This process hands responses to its children (user_processes/child.py), which call the user's functions or the built-in graders,
and replies to the rank. If a child that worked on several responses is lost, any of them may be at fault: each is scored again,
alone, so that only the one at fault gets no score. Neither torch nor transformers is imported, so a child starts quickly.
"""

import asyncio
import importlib
import inspect
import json
import resource
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rl.errors import UserError
from user_processes import child
from user_processes.child import BadValue, Child, Children, Died
from user_processes.files import import_file, split_code

START_LIMIT = 60  # seconds that a child may take to import the user's file
FIRST_CALL = 60  # extra seconds for the very first response: the function may import or load something
AT_ONCE = 64  # responses that an async function works on at once in each child
QUICK = 0.1  # seconds of work that a child gets at once, so that quick functions do not wait for messages
LOOK = 0.02  # seconds between looks for new responses while an async function works on others
BLOCKED = "the reward function blocked its event loop: await what takes time, or give it to asyncio.to_thread"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # that a verifier is called with, by name
OPTIONAL = ("prompt", "step", "split")  # that a user's function may name as well


# ------------------------------------------------------------------------------------------------------------ in a child


class Scorer:
    """What answers in a child: the functions of path/to/file.py:f,g, called as one, whose score is the sum of theirs; or the
    built-in graders. A reply is a string of JSON: {"value": ...}, or a failure."""

    def __init__(self, settings: dict):
        """Raise UserError if a function cannot be called as a verifier."""
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory"],) * 2)
        self._loop: asyncio.AbstractEventLoop | None = None  # of async functions
        self._tasks: dict[str, tuple[asyncio.Task, float]] = {}  # number of a response -> its call, and when its time is up
        self._calls: list[tuple[Callable, tuple[str, ...]]] = []  # functions, and the arguments that each is called with
        if settings["spec"]:
            path, names = split_code(settings["spec"])
            module = import_file(path, "user_reward")
            self._names = names.split(",")
            self._weights = settings["weights"] or [1.0] * len(self._names)
            for name in self._names:
                function = getattr(module, name, None)
                if not callable(function):
                    raise UserError(f"{path} has no function {name!r}")
                self._calls.append((function, ARGUMENTS + _further(name, function)))
        else:
            module, _, name = settings["built_in"].partition(":")
            self._grade = getattr(importlib.import_module(module), name)
        if any(_is_async(function) for function, _ in self._calls):
            self._loop = asyncio.new_event_loop()

    def load(self, settings: dict) -> dict:
        """Return whether a function "is_async", and what of OPTIONAL they "take"."""
        takes = {name for _, names in self._calls for name in names if name in OPTIONAL}
        return {"is_async": bool(self._loop), "takes": sorted(takes)}

    def score(self, question: dict) -> dict[str, str]:
        """Score responses one after the other. Return number -> reply."""
        replies = {}
        for number, item in question["items"].items():
            try:
                self._reply(item).send(None)
            except StopIteration as end:  # nothing is awaited
                replies[number] = end.value
        return replies

    def advance(self, question: dict) -> dict[str, str]:
        """Begin to score further responses with the async function. Return the replies of those that have ended since the last
        call, after at most LOOK seconds. Each may take `seconds`."""
        asyncio.set_event_loop(self._loop)
        for number, item in question["items"].items():
            self._tasks[number] = self._loop.create_task(self._reply(item)), time.monotonic() + question["seconds"]
        tasks = [task for task, _ in self._tasks.values()]
        self._loop.run_until_complete(asyncio.wait(tasks, timeout=LOOK, return_when=asyncio.FIRST_COMPLETED))
        replies = {}
        for number, (task, until) in self._tasks.items():
            if task.done():
                replies[number] = task.result()
            elif time.monotonic() > until:
                task.cancel()
                replies[number] = json.dumps({"event": "timeout", "message": ""})
        for number in replies:
            del self._tasks[number]
        return replies

    async def _reply(self, item: dict) -> str:
        """Return the reply for a response."""
        try:
            if not self._calls:
                return _as_json(self._grade(**item))
            values = []
            for function, names in self._calls:
                value = function(**{name: item[name] for name in names})
                values.append(await value if self._loop and inspect.isawaitable(value) else value)
            return _as_json(self._sum(values))
        except BaseException as error:
            return json.dumps(child.failure(error))

    def _sum(self, values: list) -> Any:
        """Return the weighted sum of the functions' scores, each under its name, and all their further numbers."""
        if len(values) == 1 and self._weights[0] == 1:
            return values[0]
        total = 0.0
        extra = {}
        for name, weight, value in zip(self._names, self._weights, values, strict=True):
            try:
                extra |= {name: float(value["score"])} | value if isinstance(value, dict) else {name: float(value)}
            except (KeyError, TypeError, ValueError):
                raise BadValue(f"{name} returned {value!r:.100}, not a number") from None
            total += weight * extra[name]
        return extra | {"score": total}


def _is_async(function: Callable) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _further(name: str, function: Callable) -> tuple[str, ...]:
    """Return which of OPTIONAL the function names. Raise UserError if it cannot be called as a verifier."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables have none
        return ()
    further = tuple(name for name in OPTIONAL if name in signature.parameters)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS + further))
    except TypeError as error:
        hint = ". TRL's functions must be defined in this file, with def" if "environments" in signature.parameters else ""
        raise UserError(f"{name}{signature} cannot be called with {', '.join(ARGUMENTS)}: {error}{hint}") from None
    return further


def _as_json(value: Any) -> str:
    try:
        return json.dumps({"value": value}, default=lambda value: value.item())  # numpy and torch scalars
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return json.dumps({"value": str(value)})  # no number, so a bad value


# ------------------------------------------------------------------------------------------- in the process that forks them


@dataclass
class Host:
    """What the lanes share."""

    settings: dict  # of rl/rewards/scorers.py
    children: Children
    rank: asyncio.StreamWriter
    queue: asyncio.Queue[tuple[int, bytes]] = field(default_factory=asyncio.Queue)  # responses: number, arguments as JSON
    first_calls: list[float] = field(default_factory=list)  # seconds that children took for their first response

    def reply(self, number: int, reply: str) -> None:
        self.rank.write(child.as_line({"number": number, "reply": reply}))


class Lane:
    """A child, and the responses that it works on."""

    def __init__(self, host: Host):
        self._host = host
        self._suspects: deque[tuple[int, bytes]] = deque()  # to be scored alone: they were under way when a child was lost
        self._under_way: dict[int, bytes] = {}
        self._room = 1  # responses that the child works on at once

    async def start(self) -> dict:
        """Start a child, perhaps in place of a lost one. Return what Scorer.load does. Raise UserError if it cannot."""
        self._has_answered = False
        self._began = 0.0  # when the child got its first response
        self._child = await Child.begin(self._host.children, Scorer)
        try:
            loaded = await self._child.ask(child.as_line({"do": "load"} | self._host.settings), START_LIMIT)
        except TimeoutError:
            raise UserError(f"importing it does not work: no answer after {START_LIMIT} s") from None
        except Died as error:
            raise UserError(f"importing it does not work: {error}") from None
        if "event" in loaded:
            raise UserError(loaded["message"])
        self._is_async = loaded["is_async"]
        self._room = AT_ONCE if self._is_async else 1
        return loaded

    async def run(self) -> None:
        """Score responses until this process ends."""
        try:
            while True:
                await self._score(await self._take())
        except Exception as error:
            self._host.rank.write(child.as_line({"failed": child.describe(error)}))

    async def _take(self) -> dict[int, bytes]:
        """Return further responses for the child, at least one unless some are under way; a suspect is alone."""
        if self._suspects:
            return {} if self._under_way else dict([self._suspects.popleft()])
        queue = self._host.queue
        new = {} if self._under_way else dict([await queue.get()])
        room = self._room if self._is_async else min(self._room, 1 + queue.qsize() // self._host.settings["workers"])
        while len(new) + len(self._under_way) < room and not queue.empty():
            new |= [queue.get_nowait()]
        return new

    async def _score(self, new: dict[int, bytes]) -> None:
        """Give the child these responses, and hand on the replies of those that have ended."""
        if self._child.has_ended:  # before: these responses are not at fault
            self._suspects.extend(self._under_way.items())
            self._under_way = {}
            await self.start()
        self._under_way |= new
        seconds = self._host.settings["timeout"]
        if not self._has_answered:
            seconds += max(self._host.first_calls, default=FIRST_CALL)  # to import or load something
        began = time.monotonic()
        self._began = self._began or began
        try:
            items = b", ".join(b'"%d": %s' % item for item in new.items())
            do = b"advance" if self._is_async else b"score"
            replies = await self._child.ask(b'{"do": "%s", "seconds": %f, "items": {%s}}\n' % (do, seconds, items), seconds)
        except (TimeoutError, Died) as error:
            self._find_fault(error)
            self._child.close()
            await self.start()
            return
        now = time.monotonic()
        if not self._is_async:
            self._room = max(1, min(AT_ONCE, int(len(new) * QUICK / (now - began))))
        if replies and not self._has_answered:
            self._has_answered = True
            self._host.first_calls.append(now - self._began)
        for number, reply in replies.items():
            del self._under_way[int(number)]
            self._host.reply(int(number), reply)

    def _find_fault(self, error: TimeoutError | Died) -> None:
        """Reply that the response that was under way has no score. If there were several, they become suspects."""
        if not self._has_answered:
            self._host.first_calls.append(0.0)  # no import took that long
        if len(self._under_way) > 1:
            self._suspects.extend(self._under_way.items())
        else:
            blocked = {"message": BLOCKED} if self._is_async and isinstance(error, TimeoutError) else {}
            for number in self._under_way:
                self._host.reply(number, json.dumps(child.lost(error) | blocked))
        self._under_way = {}


async def serve(rank: socket.socket, settings: dict) -> None:
    """Score the rank's responses until it closes its end."""
    reader, writer = await asyncio.open_connection(sock=rank, limit=child.LARGEST)
    host = Host(settings, Children(), writer)
    lanes = [Lane(host) for _ in range(settings["workers"])]
    try:
        ready, *_ = await asyncio.gather(*(lane.start() for lane in lanes))
    except (UserError, Died) as error:
        writer.write(child.as_line({"failed": str(error)}))
        return
    writer.write(child.as_line(ready))
    tasks = [asyncio.create_task(lane.run()) for lane in lanes]  # noqa: F841 so that they are not collected
    while line := await reader.readline():
        number, _, item = line.rstrip().partition(b" ")
        host.queue.put_nowait((int(number), item))


if __name__ == "__main__":
    child.run(lambda rank, settings: asyncio.run(serve(rank, settings)))

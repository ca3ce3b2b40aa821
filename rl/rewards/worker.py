"""What runs in a scoring process: the user's functions, or the built-in graders. rl/rewards/host.py calls it there.

It imports neither torch nor transformers, so a process starts quickly.
"""

import asyncio
import inspect
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rl import printable
from rl.errors import UserError
from rl.user_file import import_file, split_code

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # that a verifier is called with, by name
OPTIONAL = ("prompt", "step", "split")  # that a user's function may name as well
LOOK = 0.02  # seconds between looks for new responses while an async function works on others

_is_loaded = False
_functions: "Functions | None" = None  # the user's; None: the built-in graders
_loop: asyncio.AbstractEventLoop | None = None  # of an async function
_tasks: dict[int, tuple[asyncio.Task, float]] = {}  # number of a response -> its call, and when its time is up


class BadValue(Exception):
    """The user's code returned a wrong value."""

    event = "bad_value"


class Functions:
    """The functions of path/to/file.py:f,g, called as one: the score is the sum of theirs."""

    def __init__(self, spec: str, weights: Sequence[float]):
        """weights: of the functions in the sum; none: 1 each. Raise an error if one cannot be called as a verifier."""
        path, names = split_code(spec)
        module = import_file(path, "user_reward")
        self.names = names.split(",")
        self.weights = weights or [1.0] * len(self.names)
        self._calls = []  # (function, arguments that it is called with)
        for name in self.names:
            function = getattr(module, name, None)
            if not callable(function):
                raise AttributeError(f"{path} has no function {name!r}")
            self._calls.append((function, ARGUMENTS + _further(name, function)))
        self.takes = sorted({name for _, names in self._calls for name in names if name in OPTIONAL})
        self.is_async = any(_is_async(function) for function, _ in self._calls)

    def __call__(self, **item: Any) -> Any:
        """Return the value; an awaitable if one of the functions is async."""
        if self.is_async:
            return self._awaited(item)
        return self._sum([function(**_of(item, names)) for function, names in self._calls])

    async def _awaited(self, item: dict[str, Any]) -> Any:
        values = []
        for function, names in self._calls:
            value = function(**_of(item, names))
            values.append(await value if inspect.isawaitable(value) else value)
        return self._sum(values)

    def _sum(self, values: list) -> Any:
        """Return the weighted sum of the functions' scores, each under its name, and all their further numbers."""
        if len(values) == 1 and self.weights[0] == 1:
            return values[0]
        total = 0.0
        extra = {}
        for name, weight, value in zip(self.names, self.weights, values, strict=True):
            try:
                extra |= {name: float(value["score"])} | value if isinstance(value, dict) else {name: float(value)}
            except (KeyError, TypeError, ValueError):
                raise BadValue(f"{name} returned {value!r:.100}, not a number") from None
            total += weight * extra[name]
        return extra | {"score": total}


def _of(item: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: item[name] for name in names}


def _is_async(function: Callable) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _further(name: str, function: Callable) -> tuple[str, ...]:
    """Return which of OPTIONAL the function names. Raise TypeError if it cannot be called as a verifier."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables have none
        return ()
    further = tuple(name for name in OPTIONAL if name in signature.parameters)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS + further))
    except TypeError as error:
        hint = ". TRL's functions must be defined in this file, with def" if "environments" in signature.parameters else ""
        raise TypeError(f"{name}{signature} cannot be called with {', '.join(ARGUMENTS)}: {error}{hint}") from None
    return further


def load(spec: str, weights: Sequence[float], memory: int) -> dict[str, Any]:
    """Prepare this process. Return its "pid", whether a function "is_async" and what of OPTIONAL they "take", or why it
    "failed". spec: path/to/file.py:f,g, empty for the built-in graders; weights: of the functions; memory: bytes that this
    process may allocate."""
    global _is_loaded, _functions, _loop
    sys.stdout = sys.stderr  # which is unbuffered
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    try:
        _functions = Functions(spec, weights) if spec else None
    except (Exception, SystemExit) as error:
        return {"failed": describe(error)}
    if _functions and _functions.is_async:
        _loop = asyncio.new_event_loop()
    _is_loaded = True
    return {"pid": os.getpid(), "is_async": _loop is not None, "takes": _functions.takes if _functions else []}


def _check_loaded() -> None:
    """Raise RuntimeError in a process that pebble has started in place of one that ended, before `load` is called."""
    if not _is_loaded:
        raise RuntimeError


def score(items: dict[int, str]) -> dict[int, str]:
    """Score responses one after the other. Return number -> reply. items: number -> the function's arguments, both as JSON."""
    from rl.rewards.verifiers import grade  # late: only the built-in graders need it

    _check_loaded()
    replies = {}
    for number, item in items.items():
        try:
            replies[number] = _as_json((_functions or grade)(**json.loads(item)))
        except BaseException as error:
            replies[number] = _failure(error)
    return replies


def advance(items: dict[int, str], seconds: float) -> dict[int, str]:
    """Begin to score further responses with the async function. Return the replies of those that have ended since the last
    call, after at most LOOK seconds. seconds: the time that each may take."""
    _check_loaded()
    asyncio.set_event_loop(_loop)
    for number, item in items.items():
        _tasks[number] = _loop.create_task(_reply(item)), time.monotonic() + seconds
    waiting = asyncio.wait([task for task, _ in _tasks.values()], timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
    _loop.run_until_complete(waiting)
    replies = {}
    for number, (task, until) in [*_tasks.items()]:
        if task.done():
            replies[number] = task.result()
        elif time.monotonic() > until:
            task.cancel()
            replies[number] = json.dumps({"failed": "", "event": "timeout"})
    for number in replies:
        del _tasks[number]
    return replies


async def _reply(item: str) -> str:
    try:
        return _as_json(await _functions(**json.loads(item)))
    except BaseException as error:
        return _failure(error)


def _as_json(value: Any) -> str:
    try:
        return json.dumps({"value": value}, default=lambda value: value.item())  # numpy and torch scalars
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return json.dumps({"value": str(value)})  # no number, so a bad value


def _failure(error: BaseException) -> str:
    """Return the reply for a response whose function raised. An exception may name its event (rl/rewards/pool.py)."""
    return json.dumps({"failed": describe(error), "event": getattr(error, "event", "error")})


def describe(error: BaseException) -> str:
    """Return the error in one line, with its place in the user's file; for this project's own errors only the message."""
    if isinstance(error, UserError) or hasattr(error, "event"):
        return printable.one_line(str(error))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if frame.filename == __file__ else f" ({frame.filename}:{frame.lineno})"
    return printable.one_line(f"{type(error).__name__}: {error}{place}")


def how_it_ended(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}  # without most of the real-time signals
    return f"was killed by {names.get(-code, f'signal {-code}')}"

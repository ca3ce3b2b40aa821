"""What runs in a scoring process: the user's function, or the built-in graders. rl/rewards/host.py calls these functions there.

It imports neither torch nor transformers, so a process starts quickly.
"""

import asyncio
import contextlib
import inspect
import json
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from rl import printable
from rl.errors import UserError
from rl.user_file import import_file

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # that a verifier is called with, by name
LOOK = 0.02  # seconds between looks for new responses while an async function works on others

_is_loaded = False
_function: Callable | None = None  # the user's; None: the built-in graders
_loop: asyncio.AbstractEventLoop | None = None  # of an async function
_tasks: dict[int, tuple[asyncio.Task, float]] = {}  # number of a response -> its call, and when its time is up


def _find(spec: str) -> tuple[Callable, bool]:
    """Return the function of path/to/file.py:function, and whether it names `prompt`. Raise an error if it cannot be called as
    a verifier."""
    path, _, name = spec.rpartition(":")
    module = import_file(path, "user_reward")
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"{path} has no function {name!r}")
    takes_prompt = False
    with contextlib.suppress(ValueError):  # some callables have no signature
        signature = inspect.signature(function)
        takes_prompt = "prompt" in signature.parameters
        try:
            signature.bind(**dict.fromkeys(ARGUMENTS + ("prompt",) * takes_prompt))
        except TypeError as error:
            hint = ". TRL's functions must be defined in this file, with def" if "environments" in signature.parameters else ""
            raise TypeError(f"{name}{signature} cannot be called with {', '.join(ARGUMENTS)}: {error}{hint}") from None
    return function, takes_prompt


def load(spec: str, memory: int) -> dict[str, Any]:
    """Prepare this process. Return whether the function "is_async" and "takes_prompt", or why it "failed". spec:
    path/to/file.py:function, empty for the built-in graders; memory: bytes that this process may allocate."""
    global _is_loaded, _function, _loop
    sys.stdout = sys.stderr  # which is unbuffered
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    try:
        _function, takes_prompt = _find(spec) if spec else (None, False)
    except (Exception, SystemExit) as error:
        return {"failed": describe(error)}
    if inspect.iscoroutinefunction(_function) or inspect.iscoroutinefunction(type(_function).__call__):
        _loop = asyncio.new_event_loop()
    _is_loaded = True
    return {"is_async": _loop is not None, "takes_prompt": takes_prompt}


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
            replies[number] = _as_json((_function or grade)(**json.loads(item)))
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
        return _as_json(await _function(**json.loads(item)))
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

"""A scoring process: `python -m rl.rewards.worker SPEC MEMORY_GB CPU_SECONDS PARENT_PID`, started by rl/rewards/process.py.

Reads one numbered JSON item a line and answers with one JSON line that bears its number: one after the other, or with an async
function all at once. Imports neither torch nor transformers: it starts in a blink.
"""

import contextlib
import importlib.util
import inspect
import json
import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import TextIO

from rl import printable
from rl.errors import UserError
from rl.rewards import descendants
from rl.rewards.verifiers import BUILT_IN

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # of a verifier, by name


def import_file(path: str, name: str) -> ModuleType:
    """The user's file as a module of that name; it may import its neighbours."""
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    module_spec.loader.exec_module(module)
    return module


def load(spec: str):
    """The function of path/to/file.py:function, or the judge whose settings these are (rl/rewards/judge.py)."""
    if spec.startswith("{"):
        from rl.rewards import judge  # for it alone

        return judge.begin(**json.loads(spec))
    path, _, name = spec.rpartition(":")
    module = import_file(path, "user_reward")
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"{path} has no function {name!r}")
    with contextlib.suppress(ValueError):  # a callable that tells no signature
        signature = inspect.signature(function)
        try:
            signature.bind(**dict.fromkeys(ARGUMENTS))
        except TypeError as error:
            raise TypeError(f"{name}{signature} cannot be called with {', '.join(ARGUMENTS)}: {error}") from None
    return function


def in_one_line(error: BaseException) -> str:
    """The error with the line of code it came from, fit for a terminal."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if frame.filename == __file__ else f" ({frame.filename}:{frame.lineno})"  # a fault in the user's file
    return printable.one_line(f"{type(error).__name__}: {error}{place}")


def in_words(error: BaseException) -> str:
    """Likewise, of ours the message alone."""
    is_ours = isinstance(error, UserError) or hasattr(error, "event")
    return printable.one_line(str(error)) if is_ours else in_one_line(error)


def is_async(function: Callable) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def limit_cpu(seconds: float) -> None:
    """Has the system end this process (SIGXCPU) once it has used so much more CPU time, rounded up to whole seconds."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (until if hard == resource.RLIM_INFINITY else min(until, hard), hard))


def main(spec: str, memory_gb: float, cpu_seconds: float, parent: int) -> None:
    if not descendants.guard(parent):
        return
    if memory_gb:
        limit = int(memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # Answers go to a copy of stdout; what the user's function prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Items come from a copy of stdin, which no child inherits: one that reads its stdin would take the next item.
    items = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    me = os.getpid()

    def answer(reply: dict) -> None:
        if os.getpid() != me:  # a fork made by the user's function: a second answer would go to the next response
            os._exit(0)
        try:
            line = json.dumps(reply, default=lambda value: value.item())  # numpy and torch scalars
        except (AttributeError, RuntimeError, TypeError, ValueError):
            line = json.dumps(reply | {"value": str(reply["value"])})  # no number, so a bad value
        answers.write(line + "\n")
        answers.flush()

    try:
        own = load(spec) if spec else None
    except (Exception, SystemExit) as error:
        answer({"failed": in_words(error)})
        return
    if own and is_async(own):
        answer({"ready": "async"})
        with contextlib.redirect_stdout(sys.stderr):
            serve_at_once(own, items, answer, cpu_seconds)
        return
    answer({"ready": "sync"})
    for line in items:
        number, item = json.loads(line)
        function = own or BUILT_IN[item["data_source"]]
        if cpu_seconds:
            limit_cpu(cpu_seconds)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                value = function(**item)
            answer({"number": number, "value": value})
        except (Exception, SystemExit) as error:
            answer({"number": number, "failed": in_one_line(error)})


def serve_at_once(function: Callable, items: TextIO, answer: Callable[[dict], None], cpu_seconds: float) -> None:
    """Works on every item as soon as it comes, in one event loop. What a line has behind its item are the seconds that it may
    take. An exception may name the event that it is, as rl.rewards.judge's do."""
    import asyncio  # late: other functions do without it

    async def score(line: bytes) -> None:
        number, item, seconds = json.loads(line)
        try:
            async with asyncio.timeout(seconds) as limit:
                value = await function(**item)
            answer({"number": number, "value": value})
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            event = "timeout" if limit.expired() else getattr(error, "event", "error")
            answer({"number": number, "failed": in_words(error), "event": event})

    async def serve() -> None:
        loop, lines, under_way = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 30), set()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), items)
        while line := await lines.readline():
            if cpu_seconds:
                limit_cpu(cpu_seconds)
            task = loop.create_task(score(line))
            under_way.add(task)  # the loop itself holds no task
            task.add_done_callback(under_way.discard)
        os._exit(0)  # nobody waits for the rest

    asyncio.run(serve())


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))

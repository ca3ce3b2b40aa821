"""A scoring process: `python -m rl.rewards.worker SPEC MEMORY_GB CPU_SECONDS PARENT_PID`, started by rl/rewards/process.py.

It reads one item per line, as JSON [number, arguments, seconds], and replies with a JSON line that has the same number. It
scores one item after another, or with an async function all of them at once. It imports neither torch nor transformers, so it
starts quickly.
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

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # that a verifier is called with, by name


def import_file(path: str, name: str) -> ModuleType:
    """Import the user's file as a module of that name. It may import other files from its folder."""
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    module_spec.loader.exec_module(module)
    return module


def load(spec: str):
    """Return the function of path/to/file.py:function, or the judge with these settings (rl/rewards/judge.py)."""
    if spec.startswith("{"):
        from rl.rewards import judge  # late: only judges need it

        return judge.begin(**json.loads(spec))
    path, _, name = spec.rpartition(":")
    module = import_file(path, "user_reward")
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"{path} has no function {name!r}")
    with contextlib.suppress(ValueError):  # some callables have no signature
        signature = inspect.signature(function)
        try:
            signature.bind(**dict.fromkeys(ARGUMENTS))
        except TypeError as error:
            hint = ". TRL's functions must be defined in this file, with def" if "environments" in signature.parameters else ""
            raise TypeError(f"{name}{signature} cannot be called with {', '.join(ARGUMENTS)}: {error}{hint}") from None
    return function


def describe(error: BaseException) -> str:
    """Return the error in one line, with its place in the user's file; for this project's own errors only the message."""
    if isinstance(error, UserError) or hasattr(error, "event"):
        return printable.one_line(str(error))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if frame.filename == __file__ else f" ({frame.filename}:{frame.lineno})"
    return printable.one_line(f"{type(error).__name__}: {error}{place}")


def limit_cpu(seconds: float) -> None:
    """Let the system end this process (SIGXCPU) after this many further CPU seconds, rounded up; 0 is no limit."""
    if not seconds:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    until = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (until if hard == resource.RLIM_INFINITY else min(until, hard), hard))


def limit_memory(gb: float) -> None:
    """Limit this process's address space; 0 is no limit."""
    if gb:
        limit = int(gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(spec: str, memory_gb: float, cpu_seconds: float, parent: int) -> None:
    if not descendants.guard(parent):
        return
    limit_memory(memory_gb)
    given, written = descendants.take_pipes()
    items, replies = os.fdopen(given), os.fdopen(written, "w")
    sys.stdout = sys.stderr  # which is unbuffered
    me = os.getpid()

    def answer(reply: dict) -> None:
        if os.getpid() != me:  # a fork made by the user's function: its reply would count for the next response
            os._exit(0)
        try:
            line = json.dumps(reply, default=lambda value: value.item())  # numpy and torch scalars
        except (AttributeError, RuntimeError, TypeError, ValueError):
            line = json.dumps(reply | {"value": str(reply["value"])})  # no number, so a bad value
        replies.write(line + "\n")
        replies.flush()

    try:
        own = load(spec) if spec else None
    except (Exception, SystemExit) as error:
        answer({"failed": describe(error)})
        return
    is_async = inspect.iscoroutinefunction(own) or inspect.iscoroutinefunction(type(own).__call__)
    answer({"ready": "async" if is_async else "sync"})
    (serve_async if is_async else serve)(own, items, answer, cpu_seconds)


def serve(own: Callable | None, items: TextIO, answer: Callable[[dict], None], cpu_seconds: float) -> None:
    """Score one item after another, with the user's function or the built-in verifiers."""
    for line in items:
        number, item, _ = json.loads(line)
        function = own or BUILT_IN[item["data_source"]]
        limit_cpu(cpu_seconds)
        try:
            answer({"number": number, "value": function(**item)})
        except (Exception, SystemExit) as error:
            answer(failure(number, error))


def serve_async(own: Callable, items: TextIO, answer: Callable[[dict], None], cpu_seconds: float) -> None:
    """Score every item as soon as it arrives, in one event loop, and cancel items that take too long."""
    import asyncio  # late: synchronous functions do not need it

    async def score(line: bytes) -> None:
        number, item, seconds = json.loads(line)
        try:
            async with asyncio.timeout(seconds) as limit:
                value = await own(**item)
            answer({"number": number, "value": value})
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            answer(failure(number, error) | ({"event": "timeout"} if limit.expired() else {}))

    async def score_all() -> None:
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=1 << 30)
        tasks = set()  # the loop itself holds no strong reference to them
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), items)
        while line := await lines.readline():
            limit_cpu(cpu_seconds)
            task = loop.create_task(score(line))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        os._exit(0)  # nobody waits for the rest

    asyncio.run(score_all())


def failure(number: int, error: BaseException) -> dict:
    """Return the reply for an item whose function raised. An exception may name its event, as those of rl.rewards.judge do."""
    return {"number": number, "failed": describe(error), "event": getattr(error, "event", "error")}


if __name__ == "__main__":
    try:
        main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
    except ConnectionError:  # the rank has ended: Python must not flush the rest at exit
        os._exit(0)

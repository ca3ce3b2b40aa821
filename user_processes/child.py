"""Child processes that answer questions, forked from a process that user_processes/server.py has started.

A child answers one question at a time, within a time limit, as lines of JSON over a socket. What it has started ends with it,
and everything with the process that forks, which ends when the rank does. So whatever the user's code does costs one child.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from rl.errors import UserError
from rl.printable import one_line

SET_DEATH_SIGNAL = 1  # options of prctl
SET_SUBREAPER = 36
LARGEST = 1 << 28  # bytes of a line


class BadValue(Exception):
    """The user's code returned a wrong value."""

    event = "bad_value"


class Died(Exception):
    """A child has ended."""

    event = "died"


def run(main: Callable[[socket.socket, dict], None]) -> None:
    """Run the main of the process that forks, with its connection to the rank and the first message. At its end, or that of the
    rank, kill all that it has started."""
    rank = socket.socket(fileno=os.dup(0))  # which no program that it starts inherits
    os.register_at_fork(after_in_child=rank.close)  # only this process writes there
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # which is unbuffered
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two files for each child
    with contextlib.suppress(ConnectionError):  # the rank has ended
        try:
            with rank.makefile() as first:  # the next line is sent after the answer
                settings = json.loads(first.readline())
            main(rank, settings)
        finally:
            while left := children():  # and those that this process then adopts
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.wait()


class Children:
    """The children of this process, and what they leave, whose parent it becomes."""

    def __init__(self):
        adopt_orphans()
        self._known = children()  # started by the import of the user's file: a server for all episodes, for example

    def watch(self, pid: int) -> asyncio.Task[int]:
        """Return a task that waits for a process's end, and returns its exit code."""
        self._known.add(pid)
        return asyncio.create_task(self._ended(pid))

    async def _ended(self, pid: int) -> int:
        """Wait until the process ends. Kill its group, and what has left the group."""
        file = os.pidfd_open(pid)
        has_ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(file, has_ended.set)
        await has_ended.wait()
        asyncio.get_running_loop().remove_reader(file)
        os.close(file)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # it is not reaped: no other group can have its number
        _, status = os.waitpid(pid, 0)
        self._known.remove(pid)
        for left in children() - self._known:
            with contextlib.suppress(PermissionError):
                os.kill(left, signal.SIGKILL)
                os.waitpid(left, 0)
        return os.waitstatus_to_exitcode(status)


class Child:
    """A process forked from this one."""

    def __init__(self, pid: int, ended: asyncio.Task[int], streams: tuple):
        """ended: watches the process; streams: the connection with it."""
        self.pid, self._ended = pid, ended
        self._reader, self._writer = streams
        ended.add_done_callback(lambda _: self._reader.feed_eof())  # a process that it left may hold the file
        ended.add_done_callback(lambda _: self._writer.close())

    @classmethod
    async def begin(cls, children: Children, make: Callable[[dict], Any]) -> "Child":
        """Fork a process. The first question makes what answers all, by the method that a question names as `do`. Raise Died if
        that fails."""
        ours, theirs = socket.socketpair()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            raise Died(f"its process could not be forked: {error}") from None
        if not pid:
            _answer_all(make, theirs)
        theirs.close()
        return cls(pid, children.watch(pid), await asyncio.open_connection(sock=ours, limit=LARGEST))

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    async def ask(self, question: bytes, seconds: float) -> dict:
        """Return the answer to a question, a line of JSON. Raise TimeoutError, or Died."""
        self._writer.write(question)
        async with asyncio.timeout(seconds):
            line = await self._reader.readline()
            if line.endswith(b"\n"):
                return json.loads(line)
            code = await asyncio.shield(self._ended)
        raise Died(f"its process {how_it_ended(code)}")

    def close(self) -> None:
        """End the process."""
        if not self.has_ended:
            os.kill(self.pid, signal.SIGKILL)  # it is not reaped: no other process can have its number


def _answer_all(make: Callable[[dict], Any], parent: socket.socket) -> NoReturn:
    """Answer questions in a child, until the connection is closed."""
    try:
        asyncio._set_running_loop(None)
        end_with_parent()
        adopt_orphans()
        os.setsid()
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the system ends this, not the rank
        program = None
        me = os.getpid()
        for line in parent.makefile():
            question = json.loads(line)
            try:
                program = program or make(question)
                answer = as_line(getattr(program, question["do"])(question))
            except (Exception, SystemExit) as error:
                answer = as_line(failure(error))
            if os.getpid() != me:  # the user's code has forked
                break
            parent.sendall(answer)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def as_line(message: dict) -> bytes:
    return json.dumps(message).encode() + b"\n"


def failure(error: BaseException) -> dict:
    """Return the answer for an exception, which may name its event (rl/rewards/score.py)."""
    return {"event": getattr(error, "event", "error"), "message": f"{describe(error):.500}"}


def lost(error: BaseException) -> dict:
    """Return the answer for an exception that waiting for an answer has raised. The rank knows the time limit."""
    return {"event": "timeout", "message": ""} if isinstance(error, TimeoutError) else failure(error)


def describe(error: BaseException) -> str:
    """Return the error in one line, with its place in the user's file; for this project's own errors only the message."""
    if isinstance(error, UserError) or hasattr(error, "event"):
        return one_line(str(error))
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return one_line(f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})")


def how_it_ended(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}  # without most of the real-time signals
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def children() -> set[int]:
    """Return the pids of this process's children; none if the system does not list them."""
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent has ended."""
    _prctl(SET_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends."""
    _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

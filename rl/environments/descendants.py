"""The processes of episodes, and those that they leave: each ends with its episode, and all with the rank."""

import asyncio
import contextlib
import ctypes
import os
import signal
from pathlib import Path

SET_DEATH_SIGNAL = 1  # options of prctl
SET_SUBREAPER = 36


class Children:
    """The processes of all episodes, and those that they leave, whose parent this process becomes."""

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


def kill_children() -> None:
    """Kill the children of this process, and those that it then adopts, until none is left."""
    while left := children():
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.wait()


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


def python_path(first: str) -> str:
    """Return PYTHONPATH with one more directory in front of the user's, which may be needed: CANN's set_env.sh sets it."""
    return os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH")]))

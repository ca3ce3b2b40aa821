"""The processes of episodes, and those that they leave: each ends with its episode."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from rl.rewards import descendants


class Children:
    """The processes of all episodes, and those that they leave."""

    def __init__(self):
        descendants.adopt_orphans()
        self._known = _children()  # started by the import of the user's file: a server for all episodes, for example

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
        for left in _children() - self._known:  # this process has become their parent
            with contextlib.suppress(PermissionError):
                os.kill(left, signal.SIGKILL)
                os.waitpid(left, 0)
        return os.waitstatus_to_exitcode(status)


def _children() -> set[int]:
    """Return the pids of this process's children; none if the system does not list them."""
    with contextlib.suppress(OSError):
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    return set()

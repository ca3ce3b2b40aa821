"""A process that ends together with everything it has started, in whatever session: scoring processes are one.

A guard stands between the starter and the process. It adopts what loses its own parent (Linux: PR_SET_CHILD_SUBREAPER). When
the process ends, when the guard gets SIGTERM or when the starter is killed, it kills all that is left. Other systems have no
guard; there only the process's group is ended.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.rewards.environment import reward_environment

SET_DEATH_SIGNAL = 1  # options of prctl
SET_SUBREAPER = 36
NEWS = {signal.SIGTERM, signal.SIGCHLD}  # what a guard waits for
PATIENCE = 10  # seconds that a guard may take to kill what it guards
LOOK = 0.01  # seconds from one look for a process's end to the next


def guard(starter: int) -> bool:
    """Forks: the process returns True, its guard ends with it and never returns. False if the starter has ended already."""
    if sys.platform != "linux":
        return os.getppid() == starter
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, NEWS)
    _prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
    adopt_orphans()
    if os.getppid() != starter:
        return False
    me = os.getpid()
    process = os.fork()
    if process:
        _stand_by(process)
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NEWS)
    return os.getppid() == me


def end_with_parent() -> None:
    """Has the system end this process when its parent ends."""
    _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes this process the parent of what it, or a process that it has started, started and did not wait for."""
    _prctl(SET_SUBREAPER, 1)


def start(module: str, *arguments: str, passed: Sequence[str], **pipes: Any) -> subprocess.Popen:
    """Runs a module whose process becomes a guard; the number of this process is its last argument. passed: --reward-env;
    pipes: as subprocess.Popen takes them."""
    command = [sys.executable, "-m", module, *arguments, str(os.getpid())]
    root = str(Path(__file__).resolve().parent.parent.parent)
    env = reward_environment(os.environ, passed)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)


def end(process: subprocess.Popen) -> None:
    """Ends a guard, which this process has started in a session of its own, with all it guards. A guard that was killed leaves
    what it guarded: of that the rest of its process group ends."""
    if process.returncode is None:
        os.kill(process.pid, signal.SIGTERM)
    try:
        exit_code(process, PATIENCE if sys.platform == "linux" else 0)
    except subprocess.TimeoutExpired:  # no guard, or one that the process has stopped
        for pid in descendants(process.pid):
            _kill(pid)
    if process.returncode is None:  # not reaped: no other process or group can have its number
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def exit_code(process: subprocess.Popen, timeout: float) -> int:
    """Like process.wait, but on Linux it leaves the process to be reaped, so that `end` can still end the process's group.
    Raises subprocess.TimeoutExpired."""
    if sys.platform != "linux" or process.returncode is not None:
        return process.wait(timeout)
    deadline = time.monotonic() + timeout
    while not (ended := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)):
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, timeout)
        time.sleep(LOOK)
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def ending(code: int, process: str, over_cpu: str) -> tuple[str, str]:
    """The event that the end of a process is (rl/rewards/score.py), and a message. over_cpu: the message if its limit of CPU
    time ended it."""
    return ("timeout", over_cpu) if code == -signal.SIGXCPU else ("died", f"{process} {how_it_ended(code)}")


def how_it_ended(code: int) -> str:
    """An exit code in words. Python has no names for most of the real-time signals."""
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}" + (f" (SIGRTMIN+{-code - signal.SIGRTMIN})" if -code > signal.SIGRTMIN else "")


def descendants(ancestor: int) -> list[int]:
    """The processes that the ancestor has started, and those that they have started, as the system lists them now."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            parent = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = list(children.get(ancestor, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def _stand_by(process: int) -> None:
    """The guard's life. Ends as the process does, once nothing is left."""
    for pipe in (0, 1):  # they are the process's own: that it closes them tells the starter
        os.close(pipe)
    status = None
    while status is None and signal.sigwait(NEWS) == signal.SIGCHLD:
        status = _reaped().get(process)
    while left := descendants(os.getpid()):  # what forks meanwhile is found in the next round
        for pid in left:
            _kill(pid)
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
        _reaped()
    _end_as(signal.SIGKILL if status is None else status)


def _reaped() -> dict[int, int]:
    """The children that have ended since the last call, with how."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _end_as(status: int) -> None:
    """status: as os.waitpid has it."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the process may have left one
    with contextlib.suppress(OSError):  # SIGKILL, and the signals that the C library keeps for itself
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(1)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

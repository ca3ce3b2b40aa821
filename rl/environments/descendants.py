"""Processes that end together with everything they have started, in any session; and how a process ended.

A guard process sits between the starter and the process. It adopts orphans of the process (PR_SET_CHILD_SUBREAPER). When the
process ends, when the guard gets SIGTERM or when the starter is killed, the guard kills everything that is left, and exits with
the process's exit code, modulo 256.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.environments import prints
from rl.environments.environment import reward_environment

SET_DEATH_SIGNAL = 1  # options of prctl
SET_SUBREAPER = 36
NEWS = {signal.SIGTERM, signal.SIGCHLD}  # the signals that a guard waits for
PATIENCE = 10  # seconds that a guard may take to kill what it guards
LOOK = 0.01  # seconds between looks for a process's end
LAST_WORDS = 5  # seconds to pass on what was printed


def start(module: str, *arguments: str, passed: Sequence[str], **pipes: Any) -> subprocess.Popen:
    """Run a module that calls `guard` with its last argument, the id of this process. Return the guard. passed: environment
    variables, as in RL_PASS_ENV; pipes: as in subprocess.Popen."""
    root = str(Path(__file__).resolve().parents[2])
    env = reward_environment(os.environ, passed)
    env["PYTHONPATH"] = python_path(root)
    env[prints.VARIABLE] = prints.limit()
    command = [sys.executable, "-m", module, *arguments, str(os.getpid())]
    return subprocess.Popen(command, env=env, start_new_session=True, pass_fds=[prints.counter()], **pipes)


def python_path(first: str) -> str:
    """Return PYTHONPATH with one more directory in front of the user's, which may be needed: CANN's set_env.sh sets it."""
    return os.pathsep.join(filter(None, [first, os.environ.get("PYTHONPATH")]))


def guard(starter: int) -> bool:
    """Fork: the child returns True; this process becomes its guard and never returns. Return False if the starter has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, NEWS)
    _prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
    adopt_orphans()
    if os.getppid() != starter:
        return False
    me = os.getpid()
    printed = prints.Prints()
    process = os.fork()
    if process:
        _stand_guard(process, printed)
    printed.take_over()
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NEWS)
    return os.getppid() == me


def take_pipes() -> tuple[int, int]:
    """Return copies of stdin and stdout that no child inherits. The user's code gets an empty stdin, and its output is sent to
    stderr."""
    pipes = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return pipes


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends."""
    _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent has ended."""
    _prctl(SET_SUBREAPER, 1)


def end(process: subprocess.Popen) -> None:
    """End a guard that `start` has returned, and everything that it guards. If the guard has been killed, end the rest of its
    process group."""
    if process.returncode is not None:
        return
    os.kill(process.pid, signal.SIGTERM)
    try:
        exit_code(process, PATIENCE)
    except subprocess.TimeoutExpired:  # the process has stopped its guard
        for pid in descendants(process.pid):
            _kill(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # not reaped, so no other process or group can have its number
    process.wait()


def exit_code(process: subprocess.Popen, timeout: float) -> int:
    """Return the exit code of what a guard guards: negative after a signal. The guard is not reaped, so that `end` can still
    end its process group. Raise subprocess.TimeoutExpired."""
    deadline = time.monotonic() + timeout
    while not (ended := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)):
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, timeout)
        time.sleep(LOOK)
    if ended.si_code != os.CLD_EXITED:  # the guard itself was killed
        return -ended.si_status
    is_signal = 256 - signal.SIGRTMAX <= ended.si_status < 255  # 255 is exit(-1) more often than SIGHUP
    return ended.si_status - 256 if is_signal else ended.si_status


def ending(code: int, process: str, over_cpu: str) -> tuple[str, str]:
    """Return the event for the end of a process (rl/rewards/pool.py), and its message. process: a name for it; over_cpu: the
    message if it has used up its CPU time."""
    return ("timeout", over_cpu) if code == -signal.SIGXCPU else ("died", f"{process} {how_it_ended(code)}")


def how_it_ended(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}  # without most of the real-time signals
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def children() -> dict[int, list[int]]:
    """Return parent -> its children, for all processes that the system lists now."""
    found: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            parent = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(file.parent.name))
    return found


def descendants(ancestor: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    of = children()
    found = list(of.get(ancestor, ()))
    for pid in found:
        found += of.get(pid, ())
    return found


def _stand_guard(process: int, printed: prints.Prints) -> None:
    """Run the guard until nothing is left."""
    carrier = threading.Thread(target=printed.carry, daemon=True)
    carrier.start()
    for pipe in (0, 1):  # only the process may hold them, so that the starter notices if it closes them
        os.close(pipe)
    code = None
    while code is None and signal.sigwait(NEWS) == signal.SIGCHLD:
        code = _reaped().get(process)
    while left := descendants(os.getpid()):  # a process that forks meanwhile is found in the next round
        for pid in left:
            _kill(pid)
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
        _reaped()
    carrier.join(LAST_WORDS)
    os._exit((-signal.SIGKILL if code is None else code) % 256)


def _reaped() -> dict[int, int]:
    """Return the children that have ended since the last call, with their exit codes."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

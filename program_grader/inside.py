"""The first process in a sandbox. It forks a process for each program, and reports the program's output, not whether that is
right.

Python gets the text of this file on its command line (sandbox.py), since no file of the project is visible
in the sandbox. A program can print anything, so nothing that it does to its own process makes its output right. This process is
number 1 of its namespace, so no signal from inside ends it, and it is not dumpable, so nobody can trace it. A program can
change its limits and its scheduling; such changes count as left behind, and the sandbox is replaced.

The memory limit is that of a program with all its processes, files and sockets: this process adds them up while the program
runs. What could not be counted is refused by a filter of system calls (calls.py).
"""

import atexit
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types

SET_DUMPABLE, SET_SECCOMP, FILTER = 4, 22, 2  # options of prctl
ANSWER = 3  # the file descriptor for what a function returns
OPEN_FILES = 64
PROCESSES = 16  # including threads
SIGNALS = 256  # waiting ones, including timers
FILE_BYTES = 1 << 25
ENTRY_BYTES = 1 << 10  # of kernel memory for a file's name
LOOK = 0.01  # seconds between two counts of a program's memory
SYNTAX, MEMORY = 101, 102  # exit codes that only name the failure: a program may use them itself
SCRATCH = ("/tmp", "/dev/shm")
MODULES = (  # whose names contest programs take for granted
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools"),
    *("functools", "operator", "io", "sys", "json", "builtins", "typing"),
)


def main() -> None:
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with Python's handler a program's signal would reach this process
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # the starter's limit is for its own work
    tasks = os.fdopen(os.dup(0))
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in range(3):
        os.dup2(nothing, file)
    prelude = types.ModuleType("__main__")  # each fork has its own copy
    exec("\n".join(f"from {module} import *\nimport {module}" for module in MODULES), prelude.__dict__)
    unused = traces()
    _write(replies, {"ready": True})
    for line in tasks:
        reply = run(json.loads(line), prelude, nothing)
        _write(replies, reply | {"used": traces() != unused})


def _write(file: int, reply: dict) -> None:
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(file, data) :]


def traces() -> list:
    """Return everything that a program can leave behind, except processes."""
    found: list = []
    for folder in SCRATCH:
        with contextlib.suppress(OSError):
            found += [os.stat(folder).st_mode, *os.listdir(folder)]
    found += [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getaffinity(0)]
    return found + [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]


def run(task: dict, prelude: types.ModuleType, nothing: int) -> dict:
    """Run a program. Return its output as text, and how it ended: ok, or the kind of its failure. task: as made by Sandbox.run;
    prelude: a module with the names of MODULES; nothing: /dev/null."""
    given = os.memfd_create("stdin")
    with open(os.dup(given), "w", errors="replace") as file:
        file.write(task["stdin"])
    os.lseek(given, 0, os.SEEK_SET)
    output = os.memfd_create("output")
    process = os.fork()
    if not process:
        _be_program(task, prelude, given, output, nothing)
    end = os.pidfd_open(process)
    stopped = _watch(end, task)
    status = _end_all(process)
    is_long = os.fstat(output).st_size > task["output"]
    text = os.pread(output, task["output"], 0).decode(errors="replace")
    for file in (given, output, end):
        os.close(file)
    return {"output": text, "ended": "output" if is_long else stopped or _ending(status)}


def _watch(end: int, task: dict) -> str | None:
    """Return None when the program ends, or which limit it has passed: timeout or memory."""
    until = time.monotonic() + task["seconds"]
    poller = select.poll()
    poller.register(end, select.POLLIN)
    while not poller.poll(1000 * LOOK):
        if time.monotonic() > until:
            return "timeout"
        if _held(task["memory"]) > task["memory"]:
            return "memory"
    return None


def _held(limit: int) -> int:
    """Return the bytes that the program holds. A page that several processes share counts once if it matters: the resident
    sets, which count it for each, are faster to read. A socket counts as if its buffer were full."""
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    with open("/proc/net/unix") as table:
        others = SOCKET_BYTES * (sum(1 for _ in table) - 1)
    for folder in SCRATCH:
        used = os.statvfs(folder)
        others += (used.f_blocks - used.f_bfree) * used.f_frsize + (used.f_files - used.f_ffree) * ENTRY_BYTES
    if (held := others + sum(map(_resident, pids))) <= limit:
        return held
    return others + sum(_shares(pid) or _resident(pid) for pid in pids)  # read again: some may have ended meanwhile


def _resident(pid: str) -> int:
    return _number(f"/proc/{pid}/statm", 1) * resource.getpagesize()


def _shares(pid: str) -> int:
    """Return a process's bytes of memory, with its share of shared pages; 0 if that cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(1024 * int(line.split()[1]) for line in file if line.startswith(("Pss:", "SwapPss:")))
    return 0


def _number(file: str, word: int) -> int:
    with contextlib.suppress(OSError), open(file) as handle:  # the process may have ended
        return int(handle.read().split()[word])
    return 0


def _buffer_bytes() -> int:
    pair = socket.socketpair()
    size = pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    for end in pair:
        end.close()
    return size


SOCKET_BYTES = _buffer_bytes()


def _end_all(process: int) -> int:
    """End the program and everything that it has started. Return the program's status."""
    statuses = {}
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return statuses[process]
        statuses[pid] = status


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        of_cpu_limit = (signal.SIGXCPU, signal.SIGKILL)
        return "timeout" if os.WTERMSIG(status) in of_cpu_limit else "error"
    return {0: "ok", SYNTAX: "syntax", MEMORY: "memory"}.get(os.WEXITSTATUS(status), "error")


# ------------------------------------------------------------------------------------------------- the program's process


def _be_program(task: dict, prelude: types.ModuleType, given: int, output: int, nothing: int) -> None:
    """Run the program in the forked process. Never return."""
    code = 1
    try:
        prints = not task["function"] and not task["checks"]
        for source, target in ((given, 0), (output if prints else nothing, 1), (output if task["errors"] else nothing, 2)):
            os.dup2(source, target)
        os.dup2(output, ANSWER)
        os.closerange(ANSWER + 1, 4 * OPEN_FILES)
        _limit(task)
        _refuse_calls()
        code = _run_program(task, prelude if task["prelude"] else types.ModuleType("__main__"))
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # waits for the program's threads, as Python does when it ends
            atexit._run_exitfuncs()
            sys.stdout.flush()
        os._exit(code)


def _limit(task: dict) -> None:
    limits = {
        resource.RLIMIT_AS: task["memory"],
        resource.RLIMIT_CPU: task["cpu"],
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: PROCESSES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: SIGNALS,
    }
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        beyond = 1 if limit == resource.RLIMIT_CPU and most != hard else 0  # SIGXCPU at the soft limit, SIGKILL at the hard one
        resource.setrlimit(limit, (most, most + beyond))


def _refuse_calls() -> None:
    """Install the filter of system calls for this process and all that it starts. Raise OSError if there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(SET_DUMPABLE, 1, 0, 0, 0)  # so that the sandbox can read how much memory it holds
    code = ctypes.create_string_buffer(bytes.fromhex(sys.argv[1]), len(sys.argv[1]) // 2)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(code))
    if libc.prctl(SET_SECCOMP, FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter of system calls")


def _run_program(task: dict, module: types.ModuleType) -> int:
    """Run the program as this module. Return its exit code."""
    me = os.getpid()
    before = module.__dict__.get(task["function"])
    sys.setrecursionlimit(600_000)
    sys.modules["__main__"] = module
    if task["function"] or task["checks"]:
        module.__name__ = "solution"  # so that code under `if __name__ == "__main__"` does not run
    try:
        exec(compile(task["program"], "<program>", "exec"), module.__dict__)
        answer = _answer(task, module.__dict__, before)
        if answer is not None and os.getpid() == me:  # not a fork that the program made
            _write(ANSWER, answer)
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        if task["errors"]:
            sys.stdout.flush()
            traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))  # without this function's frame
        return SYNTAX if isinstance(error, SyntaxError) else MEMORY if isinstance(error, MemoryError) else 1


def _answer(task: dict, names: dict, before: object) -> dict | None:
    """Return the tested function's value, or that the checks passed; None for a program that prints. before: the object with
    the function's name before the program ran."""
    if task["checks"]:
        exec(compile(task["checks"], "<checks>", "exec"), names)
        return {"passed": True}
    if not task["function"]:
        return None
    holder = names["Solution"]() if isinstance(names.get("Solution"), type) else None
    function = getattr(holder, task["function"], None) or names[task["function"]]
    if function is before:  # the program has not defined it; it is operator's add, for example
        raise NameError(task["function"])
    return {"value": function(*map(_with_numbers, task["arguments"]))}


def _with_numbers(argument: object) -> object:
    """Return the argument; if it is a dict whose keys were integers before it became JSON, with integer keys."""
    if isinstance(argument, dict):
        with contextlib.suppress(ValueError):
            return {int(key): value for key, value in argument.items()}
    return argument


if __name__ == "__main__":
    main()

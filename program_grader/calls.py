"""The system calls that a program in the sandbox is refused: those whose memory no limit of its process counts, such as memory
files, System V segments, keys, rings of the kernel, and shared memory without a file.

`refusals` returns a filter in the kernel's language (seccomp with BPF), which inside.py installs. A refused
call returns ENOSYS, as on a kernel that lacks it, so that libraries choose another way.
"""

import errno
import platform
import socket
import struct


class NoSandbox(Exception):
    """There is no sandbox on this machine, or it does not hold. The message says what to do."""


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
CALLS = {  # name -> number on x86_64 and on aarch64; None: there is no such call
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "landlock_create_ruleset": (444, 444),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "splice": (275, 76),  # a pipe keeps pages of deleted files
    "tee": (276, 77),
    "vmsplice": (278, 75),  # a pipe keeps pages that the program has given back
}
SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}  # only streams within the sandbox: their buffers can be counted
SETSOCKOPT = (54, 208)
MMAP = (9, 222)
SHARED = 0x21  # MAP_SHARED | MAP_ANONYMOUS: while one of its pages is mapped, all that were written stay
BUFFERS = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and what root may force
NEWEST = 462  # the last call that was looked at

# Instructions of BPF, and what they read of a call: linux/seccomp.h
LOAD, EQUAL, ABOVE, AND, RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16
KILL, ALLOW = 0x80000000, 0x7FFF0000
REFUSE = 0x00050000 | errno.ENOSYS


def refusals(machine: str | None = None) -> bytes:
    """Return the filter for this machine, 8 bytes an instruction. Raise NoSandbox on a machine whose calls are not known."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise NoSandbox(f"programs of the model run on {', '.join(ARCHITECTURES)}, not on {machine}.")
    column = [*ARCHITECTURES].index(machine)
    code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    code += _refused_if(ABOVE, NEWEST)  # also the calls of x32, whose numbers are large
    for numbers in CALLS.values():
        code += _refused_if(EQUAL, numbers[column]) if numbers[column] is not None else []
    for numbers in SOCKETS.values():
        kind = [(LOAD, 0, 0, ARGUMENT), *_refused_unless(socket.AF_UNIX), (LOAD, 0, 0, ARGUMENT + 8), (AND, 0, 0, 0xF)]
        code += _of_call(numbers[column], [*kind, *_refused_unless(socket.SOCK_STREAM)])
    flags = [(LOAD, 0, 0, ARGUMENT + 24), (AND, 0, 0, SHARED), *_refused_if(EQUAL, SHARED)]
    code += _of_call(MMAP[column], flags)
    options = [(LOAD, 0, 0, ARGUMENT + 16)] + [step for option in BUFFERS for step in _refused_if(EQUAL, option)]
    code += _of_call(SETSOCKOPT[column], options)
    return b"".join(struct.pack("<HBBI", *step) for step in [*code, (RETURN, 0, 0, ALLOW)])


def _refused_if(test: int, value: int) -> list[tuple]:
    return [(test, 0, 1, value), (RETURN, 0, 0, REFUSE)]


def _refused_unless(value: int) -> list[tuple]:
    return [(EQUAL, 1, 0, value), (RETURN, 0, 0, REFUSE)]


def _of_call(number: int, steps: list[tuple]) -> list[tuple]:
    """Return the steps, which end in permission, for one call; other calls continue behind them."""
    return [(EQUAL, 0, len(steps) + 1, number), *steps, (RETURN, 0, 0, ALLOW)]

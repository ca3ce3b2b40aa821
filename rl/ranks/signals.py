"""Ctrl-C and SIGTERM, at every moment of a rank's life.

A handler written in Python runs only on the main thread, once that has returned from C++: from a collective, or from a wait for
a rank that loads a model. So Python's handler only writes the signal's number into a pipe, and a thread that reads the pipe
acts. This file needs only Python's standard library, since a script calls `install_handlers` before its imports.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

OURS = (signal.SIGINT, signal.SIGTERM)
# Wait until the process $1 has ended or is a zombie, but no longer than torchrun takes, then write $2
LAST_WORDS = """
n=0
while grep -qs "^State:.[^ZX]" "/proc/$1/status" && [ $n -lt 700 ]; do sleep 0.05; n=$((n + 1)); done
printf "%s\\n" "$2" >&2
"""

_taken = False
_struck = False  # whether this rank has received SIGTERM
_stop = threading.Event()  # whether the job is asked to stop
_after_sigterm: Callable[[], None] | None = None
_remains = "training had not begun"


def install_handlers() -> None:
    """Let Ctrl-C end this process with exit code 130 from now on, even if a shell started it in the background, with SIGINT
    ignored. SIGTERM ends it with 143, after the call of `after_sigterm`."""
    global _taken
    if _taken:
        return
    _taken = True
    read, write = os.pipe()
    os.set_blocking(write, False)
    threading.Thread(target=_watch, args=(read,), name="signals", daemon=True).start()
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in OURS:
        signal.signal(number, lambda *_: None)
    # A forked child would write its own signals into the parent's pipe, so a pool that ends its workers would end the rank
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_let_go)


def _hold() -> None:
    """Keep signals pending during a fork, until the child has reset its handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, OURS)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OURS)


def _let_go() -> None:
    signal.set_wakeup_fd(-1)
    for number in OURS:
        signal.signal(number, signal.SIG_DFL)
    _release()


def after_sigterm(act: Callable[[], None]) -> None:
    """Let SIGTERM call `act` in another thread from now on. When that returns, this process ends with exit code 143."""
    global _after_sigterm
    _after_sigterm = act


def request_stop() -> None:
    """Ask this rank to stop after the step in training."""
    _stop.set()


def stop_requested() -> bool:
    """Return whether the job is asked to stop (rl/ranks/stops.py)."""
    return _stop.is_set()


def remains(newest_checkpoint: str | None) -> None:
    """Note the newest checkpoint, for the last message of a run that is stopped."""
    global _remains
    _remains = f"the newest checkpoint is {newest_checkpoint}" if newest_checkpoint else "nothing was saved"


def _watch(read: int) -> None:
    global _struck
    while True:
        numbers = os.read(read, 64)
        if signal.SIGINT in numbers:
            if os.environ.get("LOCAL_RANK", "0") == "0":  # this rank speaks for its node
                _last_words(f"Ctrl-C: stopped; {_remains}")
            os._exit(128 + signal.SIGINT)
        if signal.SIGTERM in numbers and not _struck:
            _struck = True
            threading.Thread(target=_end_after_sigterm, name="SIGTERM", daemon=True).start()


def _end_after_sigterm() -> None:
    try:
        if _after_sigterm:
            _after_sigterm()
    finally:
        os._exit(128 + signal.SIGTERM)


def _last_words(text: str) -> None:
    """Write the line to stderr; under torchrun once that has ended, since its own lines about a Ctrl-C would bury this one."""
    if "RANK" in os.environ:
        with open(os.devnull) as nothing:
            subprocess.Popen(["sh", "-c", LAST_WORDS, "sh", str(os.getppid()), text], stdin=nothing, start_new_session=True)
    else:
        sys.stderr.write(f"\n{text}\n")  # as one write, since another thread could write between two
        sys.stderr.flush()

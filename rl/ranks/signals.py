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
import time
from collections.abc import Callable

OURS = (signal.SIGINT, signal.SIGTERM)
STOP_SECONDS = 25  # from SIGTERM to the end, finished or not: torchrun kills after 30
# Wait until the process $1 has ended or is a zombie, but no longer than torchrun takes, then write $2
LAST_WORDS = """
n=0
while grep -qs "^State:.[^ZX]" "/proc/$1/status" && [ $n -lt 700 ]; do sleep 0.05; n=$((n + 1)); done
printf "%s\\n" "$2" >&2
"""

_taken = False
_sigterm = threading.Event()
_others_are_well: Callable[[], bool] | None = None  # after `stop_gently`
_remains = "training had not begun"


def install_handlers() -> None:
    """Let Ctrl-C end this process with exit code 130 from now on, even if a shell started it in the background, with SIGINT
    ignored. SIGTERM also ends it, until `stop_gently`."""
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


def stop_gently(others_are_well: Callable[[], bool]) -> None:
    """Let the script save and exit within STOP_SECONDS after SIGTERM from now on. torchrun also sends SIGTERM when a rank has
    failed, so this rank ends at once when `others_are_well`, which is called in another thread, returns False."""
    global _others_are_well
    _others_are_well = others_are_well


def stop_requested() -> bool:
    """Return whether this rank has received SIGTERM, a cluster's notice that it will take the machine away."""
    return _sigterm.is_set()


def remains(newest_checkpoint: str | None) -> None:
    """Note the newest checkpoint, for the last message of a run that is stopped."""
    global _remains
    _remains = f"the newest checkpoint is {newest_checkpoint}" if newest_checkpoint else "nothing was saved"


def _watch(read: int) -> None:
    while True:
        numbers = os.read(read, 64)
        if signal.SIGINT in numbers:
            if os.environ.get("LOCAL_RANK", "0") == "0":  # this rank speaks for its node
                _last_words(f"Ctrl-C: stopped; {_remains}")
            os._exit(128 + signal.SIGINT)
        if signal.SIGTERM in numbers and not _sigterm.is_set():
            _sigterm.set()
            threading.Thread(target=_end_after_sigterm, name="SIGTERM", daemon=True).start()


def _end_after_sigterm() -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while _others_are_well and time.monotonic() < deadline and _others_are_well():
        time.sleep(0.1)
    os._exit(128 + signal.SIGTERM)


def _last_words(text: str) -> None:
    """Write the line to stderr; under torchrun once that has ended, since its own lines about a Ctrl-C would bury this one."""
    if "RANK" in os.environ:
        with open(os.devnull) as nothing:
            subprocess.Popen(["sh", "-c", LAST_WORDS, "sh", str(os.getppid()), text], stdin=nothing, start_new_session=True)
    else:
        sys.stderr.write(f"\n{text}\n")  # as one write, since another thread could write between two
        sys.stderr.flush()

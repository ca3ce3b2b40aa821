"""Ctrl-C and SIGTERM. Needs nothing but Python's own library: a script imports it before everything else."""

import os
import signal
import threading
import time
from collections.abc import Sequence

STOP_SECONDS = 25  # from SIGTERM to the end, whatever is unfinished then: torchrun kills after 30

_sigterm = threading.Event()


def stop_requested() -> bool:
    """Whether this rank has received SIGTERM, a cluster's notice that the machine will be taken away."""
    return _sigterm.is_set()


def stop_gently(neighbours: Sequence[int]) -> None:
    """From now on SIGTERM lets the script save and leave, for at most STOP_SECONDS. torchrun sends it too when a rank has
    failed; then, and when the others have left, this rank ends at once. neighbours: the processes of the node's ranks."""
    read, write = os.pipe()
    os.set_blocking(write, False)

    def watch() -> None:  # a thread, because the main one may sit in a collective that never ends
        while signal.SIGTERM not in os.read(read, 64):
            pass
        _sigterm.set()
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and all(map(_is_alive, neighbours)):
            time.sleep(0.1)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

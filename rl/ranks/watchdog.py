"""The watchdog, which ends a job that hangs.

A new timed phase, a record, a piece of the weights and a micro-batch count as progress; waiting does not. A rank without
progress for --hang-timeout says so, prints the stacks of its threads and exits. torchrun then ends the other ranks, which print
their stacks as well (rl/ranks/stops.py).
"""

import faulthandler
import os
import sys
import threading
import time

from rl.ranks import launch, stops

_progress_at = time.monotonic()
limit = float("inf")  # seconds without progress after which this job ends


def progress() -> None:
    """Note that something was done for which others may have waited."""
    global _progress_at
    _progress_at = time.monotonic()


def start(seconds: float) -> None:
    """Begin to watch this process. The thread also runs while the main thread is in a collective."""
    global limit
    if seconds:
        limit = seconds
        progress()
        threading.Thread(target=_watch, args=(seconds,), name="watchdog", daemon=True).start()


def _watch(seconds: float) -> None:
    while (left := _progress_at + seconds - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))
    text = f"{launch.place()} has made no progress for {seconds:g} s {stops.HANGS}"
    stops.record(text)
    print(f"error: {text}. Its threads:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    os._exit(1)

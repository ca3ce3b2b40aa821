"""Progress of long work before the first step: a bar on a terminal, elsewhere a line every ten seconds."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import rich.progress

SECONDS = 10.0  # between two lines

Item = TypeVar("Item")


def track(items: Sequence[Item], description: str, show: bool = True) -> Iterator[Item]:
    """Yield the items and show how many are done. show: False on all ranks except one."""
    if not show or sys.stdout.isatty():
        yield from rich.progress.track(items, description, transient=True, disable=not show)
        return
    started = last = time.monotonic()
    for done, item in enumerate(items):
        if (now := time.monotonic()) - last >= SECONDS:
            print(f"{description}: {done} of {len(items)}, {now - started:.0f} s", flush=True)
            last = now
        yield item


@contextlib.contextmanager
def waiting(description: str, show: bool = True) -> Iterator[None]:
    """Print every ten seconds that the block is still running, for work of unknown length such as loading a model."""
    done = threading.Event()
    started = time.monotonic()

    def say() -> None:
        while not done.wait(SECONDS):
            print(f"{description}: {time.monotonic() - started:.0f} s", flush=True)

    thread = threading.Thread(target=say, daemon=True)
    if show:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if show:
            thread.join()

"""Calls that run in a background thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_background(call: Callable, name: str) -> Future:
    """Run the call in a daemon thread of that name; return its future. The process ends without waiting for the thread."""
    future = Future()

    def make() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # `result` raises it
            future.set_exception(error)

    threading.Thread(target=make, name=name, daemon=True).start()
    return future

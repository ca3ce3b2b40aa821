"""Calls in a thread, next to the main thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_background(call: Callable, name: str) -> Future:
    """Make the call in a thread of that name. The process ends without waiting for it."""
    future = Future()

    def make() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised by `result`
            future.set_exception(error)

    threading.Thread(target=make, name=name, daemon=True).start()
    return future

"""Calls that a thread makes while the main thread does something else."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_background(call: Callable, name: str) -> Future:
    """Makes the call in a thread of that name, for which the end of the process does not wait."""
    future = Future()
    threading.Thread(target=_make, args=(call, future), name=name, daemon=True).start()
    return future


def at_once(call: Callable, name: str = "") -> Future:
    """Makes the call, and returns when it is over: for tests and simulations, where a thread would come at any time."""
    future = Future()
    _make(call, future)
    return future


def _make(call: Callable, future: Future) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised where the result is asked for
        future.set_exception(error)

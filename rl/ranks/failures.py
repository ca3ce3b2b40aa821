"""Failures of ranks, recorded in torchrun's store. The first one is explained, in full on its own node's console and in one
line on the others; failures that follow from it are not."""

import contextlib
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistBackendError, DistError, DistNetworkError, Store

from rl.errors import RankLost
from rl.printable import printable
from rl.ranks import launch, watchdog

_is_lost = False  # the store


@dataclass(frozen=True)
class Failure:
    """A failure that has just been recorded."""

    first: bool  # in the job
    first_of_node: bool


def record(what: str, name: str = "") -> Failure:
    """Record that this rank fails. what: one line. name: this rank's, unless another rank is the cause."""
    what = printable(what.encode("utf-8", "backslashreplace").decode())  # the store does not accept half of a surrogate pair
    first_of_node = tell_torchrun(what)
    cause = f"{name} on {platform.node()} failed: {what}" if name else what
    try:
        # In a single request: this rank may be killed before a second one, and the cause would be lost
        first = watchdog.first_to_fail(_open_store(), cause)
    except DistError:  # without the store, only this node is known
        first = first_of_node
    return Failure(first, first_of_node)


def tell_torchrun(what: str) -> bool:
    """Let torchrun's summary, the last lines on the console, name the cause. Return whether this rank is the first of its node
    to fail. (Each rank's file is in its own folder, inside a folder of this node and attempt.)"""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return True
    details = {"py_callstack": what, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": what, "extraInfo": details}}))
    try:
        (Path(path).parent.parent / "failed").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def cause(wait: float = 0) -> str:
    """Return the message of the first rank that failed; an empty string if none has failed after this many seconds."""
    try:
        store = _open_store()
        deadline = time.monotonic() + wait
        while not store.check([watchdog.FAILED]):
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.1)
        return store.get(watchdog.FAILED).decode()
    except DistError:
        return ""


def leave_to_report() -> None:
    """Wait if the job hangs, so that this process's watchdog can report and end it, perhaps a second later."""
    with contextlib.suppress(DistError):
        if _open_store().check([watchdog.ALARM]):
            time.sleep(4 * watchdog.ANSWER_SECONDS)


def _open_store() -> Store:
    """Return a new connection, since others may be in use or broken. Raise DistError if the store is or was lost."""
    global _is_lost
    if _is_lost:
        raise DistError("the job's store is lost")
    try:
        return launch.open_store()
    except DistError:
        _is_lost = True
        raise


def lost_connection(error: BaseException) -> bool:
    """Return whether the error means that the rank at the other end of a connection is lost. The store, NCCL and our shared
    memory have types for it; gloo raises RuntimeError with a place in its source. Errors of a logger's connection do not."""
    if isinstance(error, DistNetworkError | RankLost):
        return True
    by_torch = isinstance(error, DistBackendError) or (isinstance(error, RuntimeError) and "gloo/transport/" in str(error))
    return by_torch and any(words in str(error) for words in ("onnection", "Broken pipe", "remote process exited"))

"""Tells the ranks of a job of a failure, through torchrun's store. The first is explained, in full on the console of its own
node and in one line on the others; those that follow from it are not."""

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

_has_gone = False  # the store


@dataclass(frozen=True)
class Failure:
    """One that has just been recorded."""

    first: bool  # in the job
    first_of_node: bool


def record(what: str, name: str = "") -> Failure:
    """Tells the job that this rank fails. what: in one line; name: of the rank, unless others are to blame."""
    what = printable(what.encode("utf-8", "backslashreplace").decode())  # the store takes no half of a surrogate pair
    first_of_node = tell_torchrun(what)
    told = f"{name} on {platform.node()} failed: {what}" if name else what
    try:
        # In one request: whoever makes the second of two may be ended before, and nobody would ever know the cause.
        first = watchdog.first_to_fail(_open_store(), told)
    except DistError:  # whoever could have said more is gone
        first = first_of_node
    return Failure(first, first_of_node)


def tell_torchrun(what: str) -> bool:
    """Has torchrun's own summary, the last that appears on the console, name the cause. Returns whether this rank is its
    node's first to fail: the file of each rank is in a folder, and the folders are in one of this node and attempt."""
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
    """What the first rank that failed says, waited for this many seconds; empty if none has failed."""
    try:
        store, deadline = _open_store(), time.monotonic() + wait
        while not store.check([watchdog.FAILED]):
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.1)
        return store.get(watchdog.FAILED).decode()
    except DistError:
        return ""


def leave_to_report() -> None:
    """Returns at once unless the job hangs: then this process's watchdog, which may see that a second later, ends it when the
    report is out."""
    with contextlib.suppress(DistError):
        if _open_store().check([watchdog.ALARM]):
            time.sleep(4 * watchdog.ANSWER_SECONDS)


def _open_store() -> Store:
    """A connection of its own, since the others may be in use, or broken. Raises DistError, and tries only once, if the store
    is gone."""
    global _has_gone
    if _has_gone:
        raise DistError("the job's store is lost")
    try:
        return launch.open_store()
    except DistError:
        _has_gone = True
        raise


def lost_connection(error: BaseException) -> bool:
    """True if it says that a rank at the other end of a connection is gone: by the store, by NCCL, by our own shared memory or
    by gloo, which raises RuntimeError with the place in its source. Errors of other connections, of a logger say, are not."""
    if isinstance(error, DistNetworkError | RankLost):
        return True
    by_torch = isinstance(error, DistBackendError) or (isinstance(error, RuntimeError) and "gloo/transport/" in str(error))
    return by_torch and any(words in str(error) for words in ("onnection", "Broken pipe", "remote process exited"))


def silent_ranks() -> str:
    """Names the ranks that no longer answer, and where they ran; empty if all answer, or cannot be asked."""
    nodes = launch.nodes()
    try:
        silent = watchdog.silent()
    except DistError:  # the store is gone, and with it the node that kept it
        silent = set(nodes[0].ranks) if len(nodes) > 1 else set()
    lost = [(node, sorted(silent.intersection(node.ranks))) for node in nodes]
    return ", ".join(f"{numbered(ranks)} on {node.host}" for node, ranks in lost if ranks)


def numbered(ranks: list[int]) -> str:
    """ "rank 2", or "ranks 2, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

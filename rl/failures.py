"""How a failure travels between the ranks of a job, through torchrun's store: the first one is explained, on the console of its
own node in full and on the others' in one line; what breaks in its wake is not."""

import contextlib
import json
import os
import platform
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, DistNetworkError

from rl import dist, watchdog


@dataclass(frozen=True)
class Failure:
    """One that has just been recorded."""

    first: bool  # in the job
    first_of_node: bool


def record(name: str, what: str) -> Failure:
    """Tells the job that this rank fails; name: of the rank; what: in one line."""
    _tell_torchrun(what)
    try:
        store = dist.open_store(timedelta(seconds=5))
        first = store.add(watchdog.FAILED, 1) == 1
        if first:
            store.set("failed/cause", json.dumps(f"{name} on {platform.node()} failed: {what}"))
        return Failure(first, store.add(f"failed/on/{dist.launch().first}", 1) == 1)
    except Exception:  # the store is gone, and with it whoever could have said more
        return Failure(first=True, first_of_node=True)


def _tell_torchrun(what: str) -> None:
    """Has torchrun's own summary, the last that appears on the console, name the cause."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": what, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": what, "extraInfo": details}}))


def cause(wait: float) -> str:
    """What the first rank that failed has said, within so many seconds; empty if there is none."""
    deadline = time.monotonic() + wait
    try:
        store = dist.open_store(timedelta(seconds=5))
        while not store.check(["failed/cause"]):
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.1)
        return json.loads(store.get("failed/cause"))
    except Exception:
        time.sleep(max(0.0, deadline - time.monotonic()))  # torchrun may know more, and end this rank meanwhile
        return ""


def lost_connection(error: BaseException | str) -> bool:
    """Whether it says that a rank at the other end of a connection has gone. gloo raises RuntimeError."""
    return isinstance(error, DistNetworkError) or "onnection" in str(error)


def silent_ranks() -> str:
    """Names the ranks that no longer answer, and where they ran; empty if all answer, or cannot be asked."""
    nodes = dist.nodes()
    try:
        silent = watchdog.silent()
    except DistError:  # the store has gone, and with it the node that kept it
        silent = set(nodes[0].ranks) if len(nodes) > 1 else set()
    lost = [(node, sorted(silent.intersection(node.ranks))) for node in nodes]
    return ", ".join(f"{numbered(ranks)} on {node.host}" for node, ranks in lost if ranks)


def numbered(ranks: list[int]) -> str:
    """ "rank 2", or "ranks 2, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

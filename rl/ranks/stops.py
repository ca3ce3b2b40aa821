"""How a job of several ranks ends: by the failure of a rank, or by SIGTERM to any rank.

The first rank that fails writes the cause into the job's store. The others, which lose their connections or are ended by
torchrun, name that cause in a line per node. A rank that was killed is named by another one of its node.

SIGTERM stops the whole job after the step in training: the rank that receives it says so in the store, where a thread of every
rank waits for that word. The learners finish their step, save and leave; the generators serve them until then. torchrun also
sends SIGTERM, to the ranks of a node of which one has failed or was killed. That is no request.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import DistBackendError, DistError, DistNetworkError, Store

from rl.errors import RankLost
from rl.printable import printable
from rl.ranks import launch

SECONDS = 25  # from SIGTERM to the end, finished or not: torchrun kills after 30
CAUSE_SECONDS = 5.0  # after a lost connection, in which the failed rank, or another one of its node, may report the cause
HANGS = "(--hang-timeout)"  # the end of such a cause
# Keys of the store
FAILED = "failed"  # the message of the first rank that failed
TRAINS = "stop/trains"  # the first learner has begun to train
ASKED = "stop/asked"  # the name of the rank that received SIGTERM first
LEFT = "stop/left"  # a learner has left as requested
ENDED = "ended"  # with a rank: it has come to its end

_stop = threading.Event()


def stop_requested() -> bool:
    """Return whether the job is asked to stop."""
    return _stop.is_set()


# ------------------------------------------------------------------------------------------------------------- failures


def record(what: str) -> tuple[bool, bool]:
    """Record that this rank fails, in the store and for torchrun's summary. what: one line with this rank's name, unless
    another one is the cause. Return whether it is the first to fail in the job, and on its node."""
    what = printable(what.encode("utf-8", "backslashreplace").decode())  # the store does not accept half of a surrogate pair
    first_of_node = _tell_torchrun(what)
    try:
        return launch.open_store().compare_set(FAILED, "", what).decode() == what, first_of_node
    except DistError:  # without the store, only this node is known
        return first_of_node, first_of_node


def _tell_torchrun(what: str) -> bool:
    """Let torchrun's summary, the last lines on the console, name the cause. Return whether nothing was recorded before on this
    node. (Each rank's file is in its own folder, inside a folder of this node and attempt.)"""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return True
    if os.path.exists(file):
        return False
    details = {"py_callstack": what, "timestamp": str(int(time.time()))}
    try:
        Path(file).write_text(json.dumps({"message": {"message": what, "extraInfo": details}}))
        (Path(file).parent.parent / "first").touch(exist_ok=False)  # of ranks that fail at the same moment one makes it
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def cause(wait: float = 0) -> str:
    """Return why the job fails: the message of the first rank that failed, or the names of ranks of this node that were killed,
    which this rank reports; an empty string if there is neither after this many seconds."""
    deadline = time.monotonic() + wait
    with contextlib.suppress(DistError):  # the store is lost, or the ranks have not met
        store = launch.open_store()
        while not (found := _cause(store)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found
    return ""


def _cause(store: Store) -> str:
    if store.check([FAILED]):
        return store.get(FAILED).decode()
    gone = {rank: pid for rank, pid in launch.neighbours.items() if not launch.is_alive(pid)}
    killed = [launch.place(rank, pid) for rank, pid in gone.items() if not store.check([f"{ENDED}/{rank}"])]
    if not killed:
        return ""
    text = (
        f"{', '.join(killed)} ended without a message: killed by a signal, such as SIGKILL from the kernel when memory runs "
        "out, or by a crash in native code"
    )
    report(f"error: {text}", text)
    return text


def report(line: str, what: str) -> None:
    """Record that this rank fails, and print the line if it is the first one of its node to fail."""
    _, first_of_node = record(what)
    if first_of_node:
        print(printable(line), file=sys.stderr, flush=True)


def lost_connection(error: BaseException) -> bool:
    """Return whether the error means that the rank at the other end of a connection is lost. The store, NCCL and our shared
    memory have types for it; gloo raises RuntimeError with a place in its source. Errors of a logger's connection do not."""
    if isinstance(error, DistNetworkError | RankLost):
        return True
    by_torch = isinstance(error, DistBackendError) or (isinstance(error, RuntimeError) and "gloo/transport/" in str(error))
    return by_torch and any(words in str(error) for words in ("onnection", "Broken pipe", "remote process exited"))


# ---------------------------------------------------------------------------------------------------------------- stops


def watch(learns: bool) -> None:
    """Let SIGTERM to any rank stop the job from now on. learns: whether this rank trains. A collective of the node's ranks."""
    store = launch.open_store(timedelta(days=7))  # connections of their own, since a waiting call blocks all others
    launch.exchange_processes(store)
    threading.Thread(target=_follow, args=(store, learns), name="stops", daemon=True).start()
    # Python calls a handler only once the main thread has returned from C++, such as a collective. But it writes the signal's
    # number into a pipe at once, and a thread can read that.
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    # A forked child has the same pipe, until it has reset its handlers
    block, unblock = (partial(signal.pthread_sigmask, how, {signal.SIGTERM}) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK))
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=_reset_signals)
    threading.Thread(target=_wait_for_sigterm, args=(read,), name="SIGTERM", daemon=True).start()


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def begin_training() -> None:
    """Let a stop wait for the end of a step from now on."""
    launch.open_store().set(TRAINS, "")


def asked() -> str:
    """Return the name of the rank that received SIGTERM first, in a job that is asked to stop."""
    return launch.open_store().get(ASKED).decode()


def end_well(stopped: bool = False) -> None:
    """Note for the other ranks that this one ends without a failure. stopped: whether it was asked to stop."""
    with contextlib.suppress(DistError):  # the rank with the store has ended before
        store = launch.open_store()
        if stopped:
            store.set(LEFT, "")
        store.set(f"{ENDED}/{launch.here().rank}", "")
        store.check([ASKED])  # its answer shows that the words have arrived


def learners_left() -> bool:
    """Return whether a learner has left as requested."""
    with contextlib.suppress(DistError):
        return launch.open_store().check([LEFT])
    return False


def _follow(store: Store, learns: bool) -> None:
    """Wait for the request. End a generator when the learners have left."""
    try:
        store.wait([ASKED])
        _stop.set()
        if not learns:
            store.wait([LEFT])
            end_well()
            os._exit(0)
    except DistError:  # the store is lost: with the learners, if they were asked to stop; otherwise others report it
        if stop_requested():
            os._exit(0)


def _wait_for_sigterm(read: int) -> None:
    while signal.SIGTERM not in os.read(read, 64):
        pass
    try:
        if text := _ask():
            report(text, text)
    finally:
        os._exit(128 + signal.SIGTERM)


def _ask() -> str:
    """Ask the job to stop, after a SIGTERM to this rank. Return the reason to end at once; empty if it has been printed."""
    me = launch.place()
    deadline = time.monotonic() + SECONDS
    try:
        store = launch.open_store()
        while time.monotonic() < deadline:
            if store.check([FAILED]):
                if store.get(FAILED).decode().endswith(HANGS):
                    print(f"{me} was waiting, or has kept others waiting. Its threads:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback()
                return ""
            if _cause(store):
                return ""
            if not store.check([TRAINS]):
                return f"SIGTERM to {me}: stopped; training had not begun"
            store.compare_set(ASKED, "", me)
            time.sleep(0.1)
    except DistError:
        time.sleep(1)  # if the learners have left as requested, the other thread ends this rank
        return f"error: {launch.nodes()[0].host} no longer answers: its torchrun has ended"
    return f"error: SIGTERM to {me}: the step did not end within {SECONDS} s; the newest checkpoint stays"

"""Stops by request: SIGTERM to any rank stops the whole job after the step in training.

The rank that receives SIGTERM says so in the job's store, and a thread of every rank waits for that word. The learners finish
their step, save and leave; the generators serve them until then. Before training begins there is nothing to save, and all ranks
end at once.

torchrun also sends SIGTERM, to the ranks of a node of which one has failed or was killed. That is no request: a rank whose
neighbours have not all ended well reports the lost ones, unless they have said why, and ends.
"""

import contextlib
import os
import platform
import signal
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import DistError, Store

from rl.printable import printable
from rl.ranks import failures, launch, signals, watchdog

SECONDS = 25  # from SIGTERM to the end, finished or not: torchrun kills after 30
ASKED = "stop/asked"  # key of the store: the name of the rank that received SIGTERM first
LEFT = "stop/left"  # key of the store: a learner has left as requested, with this exit code
AT_ONCE = 128 + signal.SIGTERM  # the exit code of a stop before training

FOREVER = timedelta(days=7)

_training = False  # whether this rank stops between two steps


def watch(store: Store, role: str, number: int) -> None:
    """Let SIGTERM to any rank stop the job from now on. role: "rank", "learner" or "generator". number: this rank's within its
    role. Collective."""
    launch.exchange_processes(store)
    signals.after_sigterm(lambda: _answer(_place(f"{role} {number}")))
    follower = store.clone()  # a separate connection, since a waiting call blocks all others
    threading.Thread(target=_follow, args=(follower, role, number), name="stops", daemon=True).start()


def begin_training() -> None:
    """Let a stop wait for the end of a step from now on."""
    global _training
    _training = True


def asked() -> str:
    """Return the name of the rank that received SIGTERM first, in a job that is asked to stop."""
    return launch.open_store().get(ASKED).decode()


def exit_code() -> int | None:
    """Return the exit code with which a learner has left as requested; None if none has."""
    with contextlib.suppress(DistError):
        store = launch.open_store()
        return int(store.get(LEFT)) if store.check([LEFT]) else None


def end_well(stopped_with: int | None = None) -> None:
    """Note for the other ranks that this one ends without a failure. stopped_with: its exit code if it was asked to stop."""
    with contextlib.suppress(DistError):  # the rank with the store has ended before
        store = launch.open_store()
        if stopped_with is not None:
            store.set(LEFT, str(stopped_with))
        store.set(f"{watchdog.ENDED}/{launch.here().rank}", "")
        store.check([ASKED])  # its answer shows that the words have arrived


def _place(name: str) -> str:
    """Return this rank's name, with its number if it is called by its role, and with its host if there are several."""
    rank = f"rank {launch.here().rank}"
    called = name if name == rank else f"{name} ({rank})"
    return f"{called} on {platform.node()}" if len(launch.nodes()) > 1 else called


def _follow(store: Store, role: str, number: int) -> None:
    """Wait for the request. End this rank at once if training has not begun, or if it is a generator whose learners have
    left."""
    learns = role != "generator"
    try:
        store.wait([ASKED], FOREVER)
        signals.request_stop()
        if learns and _training:
            return  # the main thread finishes its step
        if not learns:
            store.wait([LEFT], FOREVER)
            end_well()
            os._exit(int(store.get(LEFT)))
        if number == 0:
            print(f"SIGTERM to {asked()}: stopped; training had not begun", file=sys.stderr, flush=True)
        end_well(stopped_with=AT_ONCE)
        os._exit(AT_ONCE)
    except DistError:  # the store is lost: with the learners, if they were asked to stop; otherwise others report it
        if signals.stop_requested():
            os._exit(0)


def _answer(me: str) -> None:
    """Ask the job to stop, after a SIGTERM to this rank. Return when this rank is to end at once: if another one has failed, or
    if the step takes too long."""
    deadline = time.monotonic() + SECONDS
    try:
        store = launch.open_store()
        while time.monotonic() < deadline:
            if not store.check([watchdog.ALARM]):  # otherwise the watchdog reports, and ends this rank
                if store.check([watchdog.FAILED]):
                    return
                if lost := _lost(store):
                    _report(
                        f"{lost} ended without a message: killed by a signal, such as SIGKILL from the kernel when memory runs "
                        "out, or by a crash in native code"
                    )
                    return
                store.compare_set(ASKED, "", me)
            time.sleep(0.1)
    except DistError:
        time.sleep(1)  # if the learners have left as requested, the other thread ends this rank
        _report(f"{launch.nodes()[0].host} no longer answers: its torchrun has ended")
        return
    _report(f"SIGTERM to {me}: the step did not end within {SECONDS} s; the newest checkpoint stays")


def _lost(store: Store) -> str:
    """Name the neighbours that are gone without a word, such as "generator 0 (rank 1, process 4711 on node2)"."""
    gone = {rank: pid for rank, pid in launch.neighbours().items() if not launch.is_alive(pid)}
    lost = {rank: pid for rank, pid in gone.items() if not store.check([f"{watchdog.ENDED}/{rank}"])}
    roles = {int(rank): role for node in launch.layout() for rank, role in node["ranks"].items()}
    named = {rank: f"rank {rank} (" if roles[rank] == f"rank {rank}" else f"{roles[rank]} (rank {rank}, " for rank in lost}
    return ", ".join(f"{named[rank]}process {pid} on {platform.node()})" for rank, pid in lost.items())


def _report(what: str) -> None:
    """Print the line, unless another rank of this node has reported a failure."""
    with watchdog.speaking:
        if failures.record(what).first_of_node:
            print(printable(f"error: {what}"), file=sys.stderr, flush=True)

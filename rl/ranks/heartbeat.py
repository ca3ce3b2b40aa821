"""Signs of life of all ranks: if a rank falls silent, it is named, and the job ends on every node.

A process that dies closes its connections, and the others notice at once. A process that is stopped, or whose machine loses
power or network, does not: gloo would wait half an hour for it. So a thread of each rank leaves a sign of life in torchrun's
store every two seconds (more often for a short --node-timeout). Rank 0 reads all of them in one request and, if one has not
changed for too long, writes down its verdict, which the others read; they watch rank 0. A second thread, which never uses the
network, notices if the store itself has fallen silent: then the store's node is lost, or this one is cut off.

Seconds in which a process was itself stopped do not count, since each process counts its own rounds.

Left out: a process that cannot run Python for that long, in C code that keeps its lock. It counts as silent.
"""

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistError, Store

from rl.ranks import failures, launch, watchdog

BEAT_SECONDS = 2.0  # between two signs, at most
ROUNDS = 10  # in --node-timeout, at least
TICK = 0.5  # seconds between two looks of the guard thread
LOST_SECONDS = 5.0  # after a lost connection, during which the failed rank, or torchrun, may report the cause
LEAVING_SECONDS = launch.SHORT.total_seconds() + 1  # for the last message, which may need to open the store
LAUNCHER_SECONDS = 12.0  # for torchrun to notice that its ranks have ended
VERDICT = "pulse/verdict"  # key of the store


def start(timeout: float) -> None:
    """Begin to give signs of life and to look for those of the others, once all have met. timeout: seconds; 0: do nothing."""
    here = launch.here()
    if timeout and here.world_size > 1:
        Heartbeat(here.rank, launch.nodes(), timeout, launch.open_store(timedelta(minutes=1)))


def lost_ranks() -> str:
    """After a lost connection, name the ranks that give no sign of life, and their hosts. Return an empty string if all do, if
    a rank has reported the cause, or without a heartbeat."""
    nodes = launch.nodes()
    signs = Signs([rank for node in nodes for rank in node.ranks])
    try:
        store = launch.open_store()
        signs.look(store)
        if failures.cause(wait=LOST_SECONDS):
            return ""
        signs.look(store)
        silent = {*signs.unchanged(store, 1)}
    except DistError:  # the store is lost, and with it its node
        silent = set(nodes[0].ranks) if len(nodes) > 1 else set()
    lost = [(node, sorted(silent.intersection(node.ranks))) for node in nodes]
    return ", ".join(f"{_numbered(ranks)} on {node.host}" for node, ranks in lost if ranks)


def _numbered(ranks: list[int]) -> str:
    """Return "rank 2", or "ranks 2, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Heartbeat:
    """The two threads of one rank. store: shared by all ranks, over a separate connection."""

    def __init__(self, rank: int, nodes: Sequence[launch.Node], timeout: float, store: Store):
        self.rank, self.nodes, self.timeout, self.store = rank, nodes, timeout, store
        self.interval = min(BEAT_SECONDS, timeout / ROUNDS)
        self.rounds = 0  # the number of rounds that the store has answered
        self._others = Signs([r for node in nodes for r in node.ranks if r != rank] if rank == 0 else [0])
        for run in (self._beat, self._guard):
            threading.Thread(target=run, name="watchdog: heartbeat", daemon=True).start()

    def _beat(self) -> None:
        with contextlib.suppress(DistError):  # the store is lost: the other thread notices
            while True:
                self.store.set(f"pulse/{self.rank}", str(self.rounds))
                verdict = self._verdict()
                self.rounds += 1
                if verdict:
                    self._end(verdict)
                time.sleep(self.interval)

    def _verdict(self) -> str:
        """Return a sentence that names the silent ranks, by node; an empty string if there are none."""
        if self.store.check([VERDICT]):
            return self.store.get(VERDICT).decode()
        self._others.look(self.store)
        said = []
        most = self.timeout / self.interval  # looks
        silent = self._others.unchanged(self.store, most - 1)  # a node's ranks fall silent a round apart
        if not any(self._others.looks[rank] > most for rank in silent):
            return ""
        for number, node in enumerate(self.nodes, 1):
            if ranks := [rank for rank in silent if rank in node.ranks]:
                whole = "all its ranks" if len(ranks) == node.size else _numbered(ranks)
                said.append(f"node {number}, {node.host}: no sign of life of {whole} for {self.timeout:g} s")
        verdict = f"{'; '.join(said)} (--node-timeout)"
        self.store.set(VERDICT, verdict)
        return verdict

    def _guard(self) -> None:
        """End this rank if the store does not answer."""
        seen = 0
        idle = 0.0
        while idle < self.timeout + TICK:
            time.sleep(TICK)
            seen, idle = self.rounds, idle + TICK if seen == self.rounds else 0.0
        watchdog.end_stuck_launcher(LAUNCHER_SECONDS)
        verdict = f"node 1, {self.nodes[0].host}, has not answered for {self.timeout:g} s (--node-timeout)"
        self._end(verdict, store_answers=False)

    def _end(self, verdict: str, store_answers: bool = True) -> None:
        """Print the verdict, once per node, and end this rank."""
        end = threading.Timer(LEAVING_SECONDS + 2 * self.interval, os._exit, (1,))  # the store may be out of reach
        end.name = "watchdog's end"
        end.daemon = True
        end.start()
        watchdog.speaking.acquire()  # never released: if the main thread has lost a connection by now, it must not print that
        if failures.record(verdict).first_of_node if store_answers else failures.tell_torchrun(verdict):
            cause = failures.cause() if store_answers else ""  # a rank that was itself stopped may find ended ranks silent
            print(f"error: {cause or verdict}", file=sys.stderr, flush=True)
        if self.rank in self.nodes[0].ranks:  # the store may end with this node: let the others read first
            time.sleep(1.5 * self.interval)
        os._exit(1)


class Signs:
    """The signs of some ranks, as this process has seen them. A rank that has not begun has none."""

    def __init__(self, ranks: list[int]):
        self.ranks = ranks
        self.looks: Counter[int] = Counter()  # by rank: number of looks since its sign changed
        self._last: dict[int, bytes] = {}

    def look(self, store: Store) -> None:
        """Read the signs."""
        there = [rank for rank in self.ranks if rank in self._last or store.check([f"pulse/{rank}"])]
        signs = store.multi_get([f"pulse/{rank}" for rank in there]) if there else []
        for rank, sign in zip(there, signs, strict=True):
            same = sign == self._last.get(rank)
            self.looks[rank] = self.looks[rank] + 1 if same else 0
            self._last[rank] = sign

    def unchanged(self, store: Store, looks: float) -> list[int]:
        """Return the ranks whose sign has been the same in at least this many looks, without those that have come to their
        end."""
        same = [rank for rank in self.ranks if self.looks[rank] >= looks]
        return [rank for rank in same if not store.check([f"{watchdog.ENDED}/{rank}"])]

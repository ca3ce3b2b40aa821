"""Signs of life of all ranks: if a rank falls silent, it is named, and the job ends on every node.

A process that dies closes its connections, and the others notice at once. A process that is stopped, or whose machine loses
power or network, does not: gloo would wait half an hour for it. So a thread of each rank leaves a sign of life in torchrun's
store ten times per --node-timeout, with what its main thread is doing. Rank 0 reads all of them in one request and writes down
its verdict; the others read the verdict, which is also rank 0's sign of life. A second thread, which never uses the network,
notices if the store itself has fallen silent: then the store's node is lost, or this one is cut off.

Seconds in which a process was itself stopped do not count, since each process counts its own rounds.

Left out: a process that cannot run Python for that long, in C code that keeps its lock. It counts as silent.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistError, Store

from rl.ranks import failures, launch, watchdog

ENDED = "ended"  # instead of the number of a round
ROUNDS = 10  # in --node-timeout
TICK = 0.5  # seconds between two looks of the guard thread
LEAVING_SECONDS = launch.SHORT.total_seconds() + 1  # for the last message, which may need to open the store
LAUNCHER_SECONDS = 12.0  # for torchrun to notice that its ranks have ended

_heartbeat: "Heartbeat | None" = None  # this process's own


def start(timeout: float) -> None:
    """Begin to give signs of life and to look for those of the other ranks, once all have met. timeout: seconds; 0 turns it
    off."""
    global _heartbeat
    here = launch.here()
    if timeout and here.world_size > 1:
        store = launch.open_store(timedelta(minutes=1))
        _heartbeat = Heartbeat(here.rank, launch.nodes(), timeout, store)


def finish() -> None:
    """Note that this rank has reached its end and will be silent."""
    if _heartbeat:
        _heartbeat.finish()


class Heartbeat:
    """The two threads of one rank. store: shared by all ranks, over a separate connection."""

    def __init__(self, rank: int, nodes: list[launch.Node], timeout: float, store: Store):
        self.rank, self.nodes, self.timeout, self.store = rank, nodes, timeout, store
        self.rounds = 0  # the number of rounds that the store has answered
        self._ended = threading.Event()
        self._others = Signs([r for node in nodes for r in node.ranks if r != rank] if rank == 0 else [0])
        self._threads = [
            threading.Thread(target=run, name="watchdog: heartbeat", daemon=True) for run in (self._beat, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        self._ended.set()
        self._threads[0].join(LEAVING_SECONDS)

    def _beat(self) -> None:
        try:
            while not self._ended.is_set():
                verdict, silent = self._round()
                self.rounds += 1
                if silent:
                    self._end(verdict, silent)
                self._ended.wait(self.timeout / ROUNDS)
            self.store.set(f"pulse/{self.rank}", json.dumps([ENDED, *watchdog.whereabouts()]))
        except DistError:  # the store is lost: the other thread notices
            pass

    def _round(self) -> tuple[str, list[int]]:
        """Give a sign of life. Return the verdict on silent ranks, and the silent ranks."""
        own = [self.rounds, *watchdog.whereabouts()]
        if self.rank == 0:
            silent = self._others.look(self.store)
            found = self._verdict(silent), silent
            self.store.set("pulse/0", json.dumps([*own, *found]))
            return found
        self.store.set(f"pulse/{self.rank}", json.dumps(own))
        silent = self._others.look(self.store)
        if silent or 0 not in self._others.last or self._others.last[0][0] == ENDED:
            return self._verdict(silent), silent
        return tuple(self._others.last[0][3:])

    def _guard(self) -> None:
        """End this rank if the store does not answer."""
        seen, idle = 0, 0.0
        while not self._ended.is_set() and idle < self.timeout + TICK:
            time.sleep(TICK)
            seen, idle = self.rounds, idle + TICK if seen == self.rounds else 0.0
        if not self._ended.is_set():
            last = self._others.last_seen(0) if self.rank else ""
            watchdog.end_stuck_launcher(LAUNCHER_SECONDS)
            verdict = f"node 1, {self.nodes[0].host}, has not answered for {self.timeout:g} s{last} (--node-timeout)"
            self._end(verdict, store_answers=False)

    def _verdict(self, silent: list[int]) -> str:
        """Return a sentence that names the silent ranks, by node."""
        said = []
        for number, node in enumerate(self.nodes, 1):
            if ranks := [rank for rank in silent if rank in node.ranks]:
                whole = "all its ranks" if len(ranks) == node.size else failures.numbered(ranks)
                last = "".join(self._others.last_seen(rank) for rank in ranks)
                said.append(f"node {number}, {node.host}: no sign of life of {whole} for {self.timeout:g} s{last}")
        return f"{'; '.join(said)} (--node-timeout)" if said else ""

    def _end(self, verdict: str, silent: Sequence[int] = (), store_answers: bool = True) -> None:
        """Print the verdict, once per node, and end this rank."""
        end = threading.Timer(LEAVING_SECONDS + 2 * self.timeout / ROUNDS, os._exit, (1,))  # the store may be out of reach
        end.name, end.daemon = "watchdog's end", True
        end.start()
        watchdog.speaking.acquire()  # never released: if the main thread has lost a connection by now, it must not print that
        if failures.record(verdict).first_of_node if store_answers else failures.tell_torchrun(verdict):
            cause = failures.cause() if store_answers else ""  # a rank that was itself stopped may find ended ranks silent
            print(f"error: {cause or verdict}", file=sys.stderr, flush=True)
        if self.rank in self.nodes[0].ranks:  # the store may end with this node: let the others read first
            time.sleep(1.5 * self.timeout / ROUNDS)
        watchdog.end_silent(pid for rank, pid in launch.neighbours().items() if rank in silent)
        os._exit(1)


class Signs:
    """The signs of some ranks. A rank is silent if its sign has been the same in too many looks."""

    def __init__(self, ranks: list[int]):
        self.ranks = ranks
        self.last: dict[int, list] = {}  # rank -> its last sign
        self._looks: dict[int, int] = {}  # number of looks since that sign
        self._at: dict[int, str] = {}  # the time of that sign

    def look(self, store: Store) -> list[int]:
        """Read the signs. Return the ranks that have been silent for too long."""
        there = [rank for rank in self.ranks if rank in self.last or store.check([f"pulse/{rank}"])]
        texts = store.multi_get([f"pulse/{rank}" for rank in there]) if there else []
        for rank, text in zip(there, texts, strict=True):
            sign = json.loads(text)
            if sign[0] == self.last.get(rank, [None])[0]:
                self._looks[rank] += sign[0] != ENDED
            else:
                self._looks[rank], self._at[rank] = 0, time.strftime("%X")
            self.last[rank] = sign
        if max((self._looks[rank] for rank in there), default=0) <= ROUNDS:
            return []
        return [rank for rank in there if self._looks[rank] > ROUNDS - 2]  # a node's ranks fall silent a round apart

    def last_seen(self, rank: int) -> str:
        if rank not in self.last:
            return ""
        _, name, place, *_ = self.last[rank]
        return f"; {name} was last heard of at {self._at[rank]}, in {place}"

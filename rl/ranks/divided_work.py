"""Work divided among the ranks of a node: each rank does a part, and all get the results of all parts.

    work = DividedWork()
    for row in work.part(1000): ...; work.advance()
    results = work.gather(own)                            every rank's bytes, in the order of the parts

The job's store holds a few words per rank. The results stay in memory that has no name in the file system (a memfd), which the
other ranks of the node read through /proc. A rank that waits for the other parts counts as making progress when they do, so
that --hang-timeout may be shorter than the work.
"""

import itertools
import os
import time
from datetime import timedelta
from pathlib import Path

from rl.ranks import launch, watchdog

REPORT_SECONDS = 1.0  # a rank reports its advance at most this often
LOOK_SECONDS = 0.05

_numbers = itertools.count()  # all ranks of a node divide the same work in the same order


class DividedWork:
    """One piece of work. `gather` is a collective of the ranks of this node."""

    def __init__(self):
        me = launch.here()
        ranks = sorted(launch.neighbours())
        if me.rank not in ranks:  # before the ranks have joined
            ranks = [me.rank]
        self.parts = len(ranks)
        self._place = ranks.index(me.rank)
        self._key = f"division/{next(_numbers)}/{ranks[0]}"
        self._store = launch.open_store(timedelta(minutes=1)) if self.parts > 1 else None
        self._reported_at = 0.0

    def part(self, items: int) -> range:
        """Return this rank's part of this many items. The parts are consecutive and differ by at most one item."""
        return range(items * self._place // self.parts, items * (self._place + 1) // self.parts)

    def advance(self) -> None:
        """Note that items were done."""
        watchdog.progress()
        if self._store and time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._store.add(f"{self._key}/advances", 1)
            self._reported_at = time.monotonic()

    @watchdog.doing("the parts of this node's other ranks")
    def gather(self, own: bytes) -> list[bytes]:
        """Return the bytes of every part, in order."""
        if not self._store:
            return [own]
        file = os.memfd_create("rl-division", os.MFD_CLOEXEC)
        try:
            with open(file, "wb", closefd=False) as memory:
                memory.write(own)
            self._store.set(self._name_of(self._place), f"/proc/{os.getpid()}/fd/{file}")
            self._wait_for([self._name_of(place) for place in range(self.parts)])
            paths = [self._store.get(self._name_of(place)).decode() for place in range(self.parts)]
            parts = [Path(path).read_bytes() for path in paths]
            if self._store.add(f"{self._key}/readers", 1) == self.parts:
                self._store.set(f"{self._key}/read", "")
            self._wait_for([f"{self._key}/read"])  # until then, others may still be reading this rank's
        finally:
            os.close(file)
        return parts

    def _name_of(self, place: int) -> str:
        return f"{self._key}/{place}"

    def _wait_for(self, keys: list[str]) -> None:
        seen = 0
        while not self._store.check(keys):
            advances = self._store.add(f"{self._key}/advances", 0)
            if advances > seen:
                watchdog.progress()
            seen = advances
            time.sleep(LOOK_SECONDS)

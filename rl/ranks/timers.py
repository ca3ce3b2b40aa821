"""Timers: seconds by phase of each step, and the ledger of all ranks, in which each rank's shares add up to 1.

The watchdog uses the same blocks to report what a rank is doing or waiting for.
"""

import contextlib
import time
from collections.abc import Iterator

from rl.ranks import device, dist, watchdog

PHASES = ("generate", "score", "wait", "publish", "train", "other")  # into which every rank's time is divided
PHASE_OF = {  # by timer
    "gen": "generate",
    **dict.fromkeys(("score", "env"), "score"),
    **dict.fromkeys(("wait", "held"), "wait"),  # held by the bound of staleness, until newer weights let more samples start
    "update_weights": "publish",
    **dict.fromkeys(("old_log_prob", "ref", "teacher", "adv", "values", "update_critic", "update_actor"), "train"),
}
SETTLED = {"update_actor"}  # timers that stop only when the accelerator is done, so that they include the last optimizer step


class Timers:
    """Seconds by phase since the last `restart`. A nested block's seconds do not count in the outer one."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self._inside = 0.0  # seconds of blocks inside the open one
        self._last = ""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        before = self._inside
        self._inside = 0.0
        again = name == self._last
        self._last = name
        if not again:  # a waiting loop opens the same block repeatedly, which is no progress
            watchdog.progress()
        try:
            yield
            if name in SETTLED:
                device.synchronize()
        finally:
            if not again:
                watchdog.progress()
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - self._inside
            self._inside = before + elapsed

    @property
    def elapsed(self) -> float:
        """Seconds since the last restart, timed or not."""
        return time.perf_counter() - self._started

    def ledger(self) -> dict[str, float]:
        """Return the share of the elapsed time in each of PHASES; they add up to 1."""
        shares = dict.fromkeys(PHASES, 0.0)
        elapsed = self.elapsed
        for name, seconds in self.seconds.items():
            shares[PHASE_OF.get(name, "other")] += seconds / elapsed
        return shares | {"other": 1.0 - sum(share for phase, share in shares.items() if phase != "other")}

    def restart(self) -> None:
        self.seconds.clear()
        self._started = time.perf_counter()


def gather_ledgers(name: str, timer: Timers) -> dict[str, float]:
    """Return ledger/<name>_<rank>/<phase> of every rank of the default process group. Collective."""
    ledgers = enumerate(dist.all_gather_values(timer.ledger()))
    return {f"ledger/{name}_{rank}/{phase}": share for rank, ledger in ledgers for phase, share in ledger.items()}

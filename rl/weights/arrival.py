"""Weights that arrive from another node while the engine continues.

    the learner announces version 7 -> a thread receives it into host memory, while the engine samples with version 6
    -> all of it is there: the engine takes it between two of its steps

A version in transit counts as not announced: tickets that the schedule lets start under version 6 start, and each token carries
the version that sampled it. An engine with nothing to do waits for the weights.

Versions count one by one, whatever is announced: each is sent once, and tickets and validations of version 7 follow the state
that announced version 7.
"""

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from rl.background import in_background
from rl.ranks import watchdog
from rl.ranks.host import available_memory
from rl.samples.control import State, announces
from rl.split import Split

SPARE = 0.25  # of a node's free memory, which its generators may take for weights that arrive in addition to those in use


def has_room(split: Split, size: int, pins: bool) -> bool:
    """Return whether this node has memory for a second copy of the weights for each of its generators. The first of them
    decides for all. size: bytes of a copy. pins: whether a copy is pinned, which torch rounds up to a power of two."""
    key = f"weights/room/{split.node}"
    if split.is_first_here:
        needed = split.here.generators * (1 << (size - 1).bit_length() if pins else size)
        free = available_memory()
        if needed > SPARE * free:
            needs = f"{needed / 1e9:.3g} GB, and {SPARE:.0%} of the {free / 1e9:.3g} GB that are free may be taken"
            print(f"generators wait while new weights arrive: generating meanwhile needs {needs}", file=sys.stderr, flush=True)
        split.store.set(key, str(int(needed <= SPARE * free)))
    with watchdog.doing("the first generator of this node to look for memory"):
        return split.store.get(key) == b"1"


class Announcements:
    """The states of the versions, for a generator that takes them one by one. The control block may be ahead of it: once the
    first generator of each node has a publish, the learners may announce the next one."""

    def __init__(self, store):
        self._store = store
        self._seen: dict[int, State] = {}  # by version: the newest state that this generator has seen

    def of(self, version: int, newest: State) -> State:
        """Return the state while `version`, which must not fall, was the newest, with the `stop` and `snapshot` of `newest`."""
        self._seen = {v: state for v, state in self._seen.items() if v >= version} | {newest.version: newest}
        if version not in self._seen:
            with watchdog.doing(f"the announcement of version {version} of the weights"):
                self._seen[version] = State(**json.loads(self._store.get(announces(version))))
        return replace(self._seen[version], stop=newest.stop, snapshot=newest.snapshot)


class Arrival:
    """The next version, which a thread receives."""

    def __init__(self, receive: Callable[[], None]):
        """receive: receives one version, whenever it arrives."""
        self._receive = receive
        self._coming: Future | None = None

    def begin(self) -> None:
        """Begin to receive, unless it has begun."""
        if not self._coming:
            self._coming = in_background(self._receive, "weights")

    def wait(self) -> None:
        """Return when the version is there; the next one may be received from then on. Raise errors of the thread."""
        self.begin()
        with watchdog.doing("the rest of the weights"):
            self._coming.result()
        self._coming = None

    def newest(self, announced: int, version: int, busy: bool) -> int:
        """Return the newest version that counts for an engine with weights of `version`. announced: the next one if it has been
        announced, or `version`. busy: whether the engine has work."""
        is_coming = False
        if announced > version:
            self.begin()
            if self._coming.done():
                self._coming.result()
            else:
                is_coming = busy
        watchdog.waits_for("newer weights, which are arriving", is_coming)
        return version if is_coming else announced

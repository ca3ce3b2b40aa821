"""Tickets: drawn from the store's counter, started where the schedule allows it, counted.

`Draws` asks the store each time. `DrawAhead` has a thread ask: a generator far from the store does not wait for a round trip.
Left out: the bound of staleness (rl/samples/schedule.py), and what becomes of the groups (rl/samples/buffer.py).
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch.distributed import Store

from rl.ranks import watchdog
from rl.samples.control import State
from rl.samples.group import Group
from rl.samples.schedule import ScheduleArgs


class Draws:
    """Tickets that were drawn from the store's counters and have not started yet."""

    counter = "tickets/started"  # in the store

    def __init__(self, store: Store, again: list[int]):
        """again: tickets that go before all others."""
        self.store, self.again = store, again
        self.reserve: deque[int] = deque()

    def have(self, count: int, lists: int = 0) -> None:
        """Draws until this many are at hand, in one request. lists: of tickets to start again (rl/samples/claims.py)."""
        self.reserve.extend(self._draw(count - len(self.reserve)))

    def start(self) -> int:
        """The next ticket, which is at hand; it counts as started."""
        self.store.add(self.counter, 1)
        return self.reserve.popleft()

    def settle(self) -> None:
        """Returns when the store has counted all that have started."""

    def _draw(self, count: int) -> list[int]:
        drawn = []
        if self.again and count > 0:
            stop = self.store.add("tickets/taken_again", count)
            drawn = self.again[stop - count : stop]
            if stop >= len(self.again):
                self.again = []
        if (count := count - len(drawn)) > 0:
            stop = self.store.add("tickets/drawn", count)
            drawn += range(stop - count, stop)
        return drawn


class Tickets:
    """Hands a generator the tickets that may start there. It draws as many as it has room for, and keeps those that may not
    start yet.

    A generator has no more under way than an even share of what all may have: with many slots the first ones would take all
    that a publish lets start, and the others wait. Every ticket that may start finds a generator below its share. What is kept
    starts before all that is not drawn yet.
    """

    def __init__(
        self,
        store: Store,
        args: ScheduleArgs,
        total: int,
        engines: int = 1,
        make_draws: Callable[[Store, list[int]], Draws] = Draws,
    ):
        """total: tickets that will be trained in the whole run; engines: that share them; make_draws: for another way to the
        store's counters."""
        self.store, self.args, self.total = store, args, total
        self.engines = engines
        self.held = False  # whether the bound of staleness alone kept the last `take` from starting any
        opened = json.loads(store.get("tickets/opened"))
        self._draws = make_draws(store, opened["again"])
        self._unfinished: set[int] = set(opened["unfinished"])  # tickets of the resumed run of which something is left

    def take(self, most: int, under_way: int, version: int, state: State) -> list[int]:
        """Up to this many tickets that may start under the weights of `version`, in addition to those under way here; none
        before the first weights, none if newer ones are ready, which would sample them better, and none if the run stops."""
        self.held = False
        if state.stop:
            self._draws.settle()
            return []
        share = -(-self.args.quota(0) // self.engines)
        most = max(0, min(most, share - under_way))
        self._draws.have(most)
        out: list[int] = []
        while 0 <= version == state.version and len(out) < most and self._may_start(version, state.dropped):
            out.append(self._draws.start())
        self.held = most > 0 and not out and 0 <= version == state.version and self._is_held(version, state.dropped)
        watchdog.waits_for("newer weights, before which no more tickets may start", most > 0 and not out)
        return out

    def partial(self, ticket: int) -> Group | None:
        """The ticket's responses as they were when the run was stopped."""
        return Group.from_bytes(self.store.get(f"tickets/unfinished/{ticket}")) if ticket in self._unfinished else None

    def _may_start(self, version: int, dropped: int) -> bool:
        """Whether the next ticket that was drawn may."""
        reserve = self._draws.reserve
        return bool(reserve) and reserve[0] - dropped < min(self.args.quota(version), self.total)

    def _is_held(self, version: int, dropped: int) -> bool:
        """Whether the next ticket that was drawn may start under newer weights, and not under these. False where none has been
        drawn yet, or all that will be trained have started."""
        reserve = self._draws.reserve
        return bool(reserve) and self.args.quota(version) <= reserve[0] - dropped < self.total


def open_tickets(
    store: Store, drawn: int = 0, started: int = 0, again: Sequence[int] = (), unfinished: Iterable[Group] = ()
) -> None:
    """Sets the counters of a run that begins, or resumes with these; to be called once. Generators wait for it.

    again: tickets that were drawn and are nowhere; unfinished: those of them whose responses continue.
    """
    store.add("tickets/drawn", drawn)
    store.add("tickets/started", started)
    of = {group.ticket: group for group in unfinished}
    for ticket, group in of.items():
        store.set(f"tickets/unfinished/{ticket}", group.to_bytes())
    store.set("tickets/opened", json.dumps({"again": list(again), "unfinished": list(of)}))


def drawn(store: Store) -> int:
    """Tickets that all generators have drawn."""
    return store.add("tickets/drawn", 0)


def started(store: Store) -> int:
    """Tickets that all generators have started."""
    return store.add("tickets/started", 0)


class DrawAhead(Draws):
    """As Draws, but a thread asks the store, over a connection of its own: `have` says what is wanted, and does not wait."""

    def __init__(self, store: Store, again: list[int]):
        super().__init__(store.clone(), again)
        self._wanted, self._started = 0, 0  # to be at hand; that the store has not counted yet
        self._changed, self._error = threading.Condition(), None
        threading.Thread(target=self._serve, name="tickets", daemon=True).start()

    def have(self, count: int, lists: int = 0) -> None:
        with self._changed:
            if self._error:
                raise self._error
            self._wanted = count
            if self._lacks:
                self._changed.notify_all()

    def start(self) -> int:
        with self._changed:
            self._wanted -= 1
            self._started += 1
            self._changed.notify_all()
            return self.reserve.popleft()

    def settle(self) -> None:
        with self._changed:
            self._wanted = 0
            while self._started and not self._error:
                self._changed.wait(1.0)  # a signal's handler runs in between
            if self._error:
                raise self._error

    @property
    def _lacks(self) -> int:
        return max(0, self._wanted - len(self.reserve))

    def _keep(self, drawn: list[int]) -> None:
        self.reserve.extend(drawn)

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._lacks or self._started)
                    lacks, started = self._lacks, self._started
                drawn = self._draw(lacks)
                if started:
                    self.store.add(self.counter, started)
                with self._changed:
                    self._keep(drawn)
                    self._started -= started
                    self._changed.notify_all()
        except BaseException as error:  # raised again in the main thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

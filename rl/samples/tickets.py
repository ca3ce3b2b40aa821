"""Tickets: drawn from the store's counter, started where the schedule allows it, counted.

A generator far from the store does not wait for a round trip: it asks in the background, ahead of what it needs. Left out: the
bound of staleness (rl/samples/schedule.py), and what becomes of the groups (rl/samples/buffer.py).
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait

from torch.distributed import Store

from rl.background import at_once
from rl.ranks import watchdog
from rl.samples.control import State
from rl.samples.group import Group
from rl.samples.schedule import ScheduleArgs

OPENED, DRAWN, STARTED = "tickets/opened", "tickets/drawn", "tickets/started"  # keys of the store; the last two are counters


class Tickets:
    """Hands a generator the tickets that may start there. It draws as many as it has room for, and keeps those that may not
    start yet.

    A generator has no more under way than an even share of what all may have: with many slots the first ones would take all
    that a publish lets start, and the others wait. Every ticket that may start finds a generator below its share. What is kept
    starts before all that is not drawn yet.
    """

    def __init__(self, store: Store, args: ScheduleArgs, total: int, engines: int = 1, ask: Callable[..., Future] = at_once):
        """total: tickets that will be trained in the whole run; engines: that share them; ask: makes a request to the store, of
        which one at a time is under way. With `in_background` nothing but `partial` waits for the store, which must then be a
        connection of its own."""
        self.store, self.args, self.total = store, args, total
        self.engines = engines
        self.held = False  # whether the bound of staleness alone kept the last `take` from starting any
        opened = json.loads(store.get(OPENED))
        self._again, self._drawn_before = opened["again"], opened["drawn"]
        self._unfinished: set[int] = set(opened["unfinished"])  # tickets of the resumed run of which something is left
        self._reserve: deque[int] = deque()  # tickets that are drawn and have not started
        self._started = 0  # tickets that the store has not counted yet
        self._ask = ask
        self._request: Future | None = None  # under way

    def take(self, most: int, under_way: int, version: int, state: State) -> list[int]:
        """Up to this many tickets that may start under the weights of `version`, in addition to those under way here; none
        before the first weights, none if newer ones are ready, which would sample them better, and none if the run stops."""
        self.held = False
        if state.stop:
            self._settle()
            return []
        share = -(-self.args.quota(0) // self.engines)
        most = max(0, min(most, share - under_way))
        self._draw(most)
        out: list[int] = []
        while 0 <= version == state.version and len(out) < most and self._may_start(version, state.dropped):
            ticket = self._reserve.popleft()
            if ticket >= state.settled and ticket not in state.skipped:
                out.append(ticket)
        self._started += len(out)
        self._draw(most - len(out))
        self.held = most > 0 and not out and 0 <= version == state.version and self._is_held(version, state.dropped)
        watchdog.waits_for("newer weights, before which no more tickets may start", most > 0 and not out)
        return out

    def partial(self, ticket: int) -> Group | None:
        """The ticket's responses as they were when the run was stopped."""
        return Group.from_bytes(self.store.get(f"tickets/unfinished/{ticket}")) if ticket in self._unfinished else None

    def _may_start(self, version: int, dropped: int) -> bool:
        """Whether the next ticket that was drawn may."""
        return bool(self._reserve) and self._reserve[0] - dropped < min(self.args.quota(version), self.total)

    def _is_held(self, version: int, dropped: int) -> bool:
        """Whether the next ticket that was drawn may start under newer weights, and not under these. False where none has been
        drawn yet, or all that will be trained have started."""
        return bool(self._reserve) and self.args.quota(version) <= self._reserve[0] - dropped < self.total

    def _draw(self, wanted: int) -> None:
        """Takes what has been drawn, and asks for what is missing in the reserve. Raises what went wrong with a request."""
        self._take_drawn()
        missing = max(0, wanted - len(self._reserve))
        if not self._request and (missing or self._started):
            started, self._started = self._started, 0
            self._request = self._ask(lambda: self._call_store(missing, started), "tickets")
            self._take_drawn()

    def _take_drawn(self) -> None:
        if self._request and self._request.done():
            request, self._request = self._request, None
            self._reserve.extend(request.result())

    def _settle(self) -> None:
        """Returns when the store has counted all that have started."""
        while self._request or self._started:
            wait([self._request] if self._request else ())
            self._draw(0)

    def _call_store(self, missing: int, started: int) -> list[int]:
        drawn = []
        if missing:
            stop = self.store.add(DRAWN, missing)
            drawn = [self._ticket(count) for count in range(stop - missing, stop)]
        if started:
            self.store.add(STARTED, started)
        return drawn

    def _ticket(self, count: int) -> int:
        """The ticket at this count of DRAWN: after a resume it begins below the tickets that nobody has drawn, by as many as
        start again."""
        return count if count >= self._drawn_before else self._again[count - self._drawn_before]


def open_tickets(
    store: Store, drawn: int = 0, again: Sequence[int] = (), unfinished: Iterable[Group] = (), skipped: int = 0
) -> None:
    """Sets the counters of a run that begins, or resumes after this many tickets were drawn; to be called once. Generators wait
    for it.

    again: tickets that were drawn and are nowhere; unfinished: those of them whose responses continue; skipped: how many were
    drawn and never started.
    """
    store.add(DRAWN, drawn - len(again))
    store.add(STARTED, drawn - len(again) - skipped)
    of = {group.ticket: group for group in unfinished}
    for ticket, group in of.items():
        store.set(f"tickets/unfinished/{ticket}", group.to_bytes())
    store.set(OPENED, json.dumps({"drawn": drawn, "again": list(again), "unfinished": list(of)}))


def drawn(store: Store) -> int:
    """Tickets that all generators have drawn, in the run that was resumed, too."""
    return max(store.add(DRAWN, 0), json.loads(store.get(OPENED))["drawn"])


def started(store: Store) -> int:
    """Tickets that all generators have started."""
    return store.add(STARTED, 0)

"""Tickets, which are drawn from the store's counter, started when the schedule allows it, and counted.

Left out: the bound of staleness (rl/samples/split_schedule.py), and the groups' fate (rl/samples/stream.py).
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence

from torch.distributed import Store

from rl.samples.channel import State
from rl.samples.group import Group
from rl.samples.split_schedule import AsyncSchedule

OPENED, DRAWN, STARTED = "tickets/opened", "tickets/drawn", "tickets/started"  # keys of the store; the last two are counters


class Tickets:
    """The tickets of one generator. It draws as many as it has room for, and keeps those that may not start yet.

    A generator has at most an even share of the tickets under way: the first ones would otherwise take all tickets that a
    publish lets start. For every ticket that may start, some generator is below its share.
    """

    def __init__(self, store: Store, schedule: AsyncSchedule, total: int, engines: int = 1):
        """total: number of tickets that the whole run will train. engines: number of engines that share the tickets."""
        self.store, self.schedule, self.total = store, schedule, total
        self.engines = engines
        self.held = False  # whether only the bound of staleness kept the last `take` from starting any
        opened = json.loads(store.get(OPENED))
        self._again, self._drawn_before = opened["again"], opened["drawn"]
        self._unfinished: set[int] = set(opened["unfinished"])  # tickets of the resumed run with a saved group
        self._reserve: deque[int] = deque()  # tickets that are drawn and have not started

    def take(self, most: int, under_way: int, version: int, state: State) -> list[int]:
        """Return up to `most` tickets that may start under the weights of `version`. None start before the first weights, if
        newer ones are ready, or if the run stops. under_way: number of tickets under way here."""
        share = -(-self.schedule.quota(0) // self.engines)
        most = 0 if state.stop else max(0, min(most, share - under_way))
        if missing := max(0, most - len(self._reserve)):
            stop = self.store.add(DRAWN, missing)
            before = self._drawn_before  # after a resume the first counts are tickets that start again
            drawn = range(stop - missing, stop)
            self._reserve.extend(count if count >= before else self._again[count - before] for count in drawn)
        out: list[int] = []
        quota = self.schedule.quota(version)
        starts = 0 <= version == state.version
        while starts and len(out) < most and self._next(state) < min(quota, self.total):
            out.append(self._reserve.popleft())
        if out:
            self.store.add(STARTED, len(out))
        self.held = most > 0 and not out and starts and quota <= self._next(state) < self.total
        return out

    def partial(self, ticket: int) -> Group | None:
        """Return the ticket's responses as they were when the run was stopped; None if there are none."""
        return Group.from_bytes(self.store.get(f"tickets/unfinished/{ticket}")) if ticket in self._unfinished else None

    def _next(self, state: State) -> float:
        """Return the next ticket in the reserve, minus the number of dropped ones, for the bound of staleness."""
        return self._reserve[0] - state.dropped if self._reserve else math.inf


def open_tickets(store: Store, drawn: int = 0, again: Sequence[int] = (), unfinished: Iterable[Group] = ()) -> None:
    """Set the counters of a run that begins, or that resumes after `drawn` tickets were drawn; generators wait for them. again:
    drawn tickets without a group. unfinished: groups of the tickets that continue."""
    store.add(DRAWN, drawn - len(again))
    store.add(STARTED, drawn - len(again))
    of = {group.ticket: group for group in unfinished}
    for ticket, group in of.items():
        store.set(f"tickets/unfinished/{ticket}", group.to_bytes())
    store.set(OPENED, json.dumps({"drawn": drawn, "again": list(again), "unfinished": list(of)}))


def drawn(store: Store) -> int:
    """Return the number of tickets that all generators have drawn, including those drawn before the run was resumed."""
    return max(store.add(DRAWN, 0), json.loads(store.get(OPENED))["drawn"])


def started(store: Store) -> int:
    """Return the number of tickets that all generators have started."""
    return store.add(STARTED, 0)

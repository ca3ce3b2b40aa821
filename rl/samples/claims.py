"""Tickets where generators come and go: each one's holder is recorded in the store, so that a lost generator's can start again.

A ticket is drawn from the same counter as ever, and then claimed: its key goes from nothing to the holder in one step of the
store (compare and set), and so does that of a ticket from a list of those that start again. Whoever comes second draws another.
So a generator that dies between the two, or comes back after it was taken for lost, costs nothing: no ticket has two holders,
and one whose holder is gone goes into the next list.

A holder is "<member>.<rank>.<number of the claim>". The keys stay: some 100 bytes of the first learner's memory a ticket.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable

from torch.distributed import Store

from rl.record.identity import Identity
from rl.samples.tickets import DrawAhead
from rl.split import Split
from rl.transport.elastic import Crew

AGAIN = b"again"


def draws(args, split: Split, job) -> Callable[[Store, list[int]], DrawAhead]:
    """The way to the store's counters for a generator (Tickets' make_draws). Raises UserError if it has joined a run that is
    not its own."""
    if split.is_member:
        Identity(args, job.script, job.path, job.prompts).check_joins(json.loads(split.store.get("identity")))
    member, rank = split.elastic and split.elastic.member, split.ranks.rank
    return lambda store, again: DrawAhead(store, again) if member is None else Claims(store, again, member, rank)


class Claims(DrawAhead):
    """Draws tickets ahead, and claims them."""

    def __init__(self, store: Store, again: list[int], member: int, rank: int):
        self.counter = counter_of(member)
        self._name, self._claims = f"{member}.{rank}", 0
        self._lists, self._read = 0, 0  # of tickets to start again: that are there, and that were read to their end
        self._list: list[int] = []
        super().__init__(store, again)

    def have(self, count: int, lists: int = 0) -> None:
        self._lists = max(self._lists, lists)
        super().have(count, lists)

    @property
    def _lacks(self) -> int:
        """With tickets to start again all that are wanted: they go before those at hand, which may have to wait for them."""
        return self._wanted if self._list or self._read < self._lists else super()._lacks

    def _keep(self, drawn: list[int]) -> None:
        self.reserve = deque(sorted([*self.reserve, *drawn]))

    def _draw(self, count: int) -> list[int]:
        out = []
        while len(out) < count and (of_list := self._from_lists(count - len(out))):
            out += filter(self._claim, of_list)
        while (lacks := self._wanted - len(self.reserve) - len(out)) > 0:
            out += filter(self._claim, super()._draw(lacks))
        return out

    def _from_lists(self, count: int) -> list[int]:
        while self._list or self._read < self._lists:
            if not self._list:
                self._read += 1
                self._list = json.loads(self.store.get(f"tickets/again/{self._read}"))
            stop = self.store.add(f"tickets/taken_again/{self._read}", count)
            drawn = self._list[stop - count : stop]
            if stop >= len(self._list):
                self._list = []
            if drawn:
                return drawn
        return []

    def _claim(self, ticket: int) -> bool:
        self._claims += 1
        own, key = f"{self._name}.{self._claims}", key_of(ticket)
        if (holder := self.store.compare_set(key, "", own)) == AGAIN:
            holder = self.store.compare_set(key, AGAIN.decode(), own)
        return holder == own.encode()


def key_of(ticket: int) -> str:
    return f"tickets/holder/{ticket}"


def counter_of(member: int) -> str:
    return f"tickets/started/{member}"


def reissue(store: Store, number: int, open_tickets: Iterable[int], gone: Iterable[int], all_lost: bool) -> list[int]:
    """Writes list `number` of tickets that start again, if there are any; returns them. open_tickets: drawn, and neither
    trained nor dropped nor here; gone: members. all_lost: also those that nobody has claimed yet; otherwise these are left to
    who draws them."""
    lost = []
    for ticket in open_tickets:
        holder = store.compare_set(key_of(ticket), "", AGAIN.decode()) if all_lost else _holder(store, ticket)
        if holder not in (b"", AGAIN) and int(holder.split(b".")[0]) in gone:
            store.set(key_of(ticket), AGAIN.decode())
            lost.append(ticket)
        elif holder == AGAIN and all_lost:
            lost.append(ticket)
    if lost:
        store.set(f"tickets/again/{number}", json.dumps(lost))
    return lost


def _holder(store: Store, ticket: int) -> bytes:
    key = key_of(ticket)
    return store.get(key) if store.check([key]) else b""


def started(store: Store, crew: Crew) -> int:
    """Tickets that have started and are not to start again: of members that are gone those whose groups came."""
    at_work = sum(store.add(counter_of(member), 0) for member in (0, *crew.members))
    return store.add("tickets/started", 0) + at_work + Counter(crew.gone).total()

"""Tickets drawn ahead: each is drawn once, and the caller never waits for the store."""

import threading
import time

import numpy as np
import pytest
from torch.distributed import HashStore

from rl.samples.control import State
from rl.samples.schedule import AsyncSchedule
from rl.samples.tickets import Tickets, open_tickets, started

pytestmark = pytest.mark.timeout(200)


class FarStore:
    """The store of a distant node: a call takes a while, and calls from the main thread are counted."""

    def __init__(self, store: HashStore):
        self.store, self.from_main = store, 0

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def add(self, key: str, amount: int) -> int:
        self.from_main += threading.current_thread() is threading.main_thread()
        time.sleep(0.005)
        return self.store.add(key, amount)


def until(done) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_every_ticket_starts_once_and_in_time_and_no_step_waits_for_the_store(seed):
    random, total = np.random.default_rng(seed), 48
    args = AsyncSchedule(ppo_mini_batch_size=6, staleness_threshold=[0, 0.5, 1, 2][seed])
    far = FarStore(HashStore())
    open_tickets(far.store)
    engines = int(random.integers(1, 4))
    generators = [Tickets(far, args, total, engines) for _ in range(engines)]
    under_way, sent = [[] for _ in generators], []
    for version in range(total // 6):
        state, needed = State(version=version, dropped=0), 6 * (version + 1)

        def turn(state=state) -> None:
            for generator, own in zip(generators, under_way, strict=True):
                fresh = generator.take(int(random.integers(1, 9)), len(own), state.version, state)
                assert all(ticket < min(args.quota(state.version), total) for ticket in fresh)
                own += fresh

        def done(needed=needed) -> bool:
            turn()
            for own in under_way:
                if own and len(sent) < needed:
                    sent.append(own.pop(0))
            return len(sent) == needed

        until(done)
    stop = State(version=total // 6, dropped=0, stop=True)
    assert not far.from_main
    assert [generator.take(9, 0, stop.version, stop) for generator in generators] == [[]] * engines
    tickets = sent + [ticket for own in under_way for ticket in own]
    assert sorted(tickets) == [*range(total)] and started(far.store) == total


def test_what_may_not_start_yet_is_at_hand_when_the_weights_come():
    far, args = FarStore(HashStore()), AsyncSchedule(ppo_mini_batch_size=4, staleness_threshold=0)
    open_tickets(far.store)
    tickets = Tickets(far, args, 80, 1)
    state = State(version=0, dropped=0)
    first: list[int] = []
    until(lambda: first.extend(tickets.take(4, len(first), 0, state)) or len(first) == 4)
    until(lambda: tickets.take(4, 0, 0, state) == [] and int(far.store.add("tickets/drawn", 0)) == 8)
    until(lambda: len(tickets._reserve) == 4)
    assert tickets.take(4, 0, 1, State(version=1, dropped=0)) == [4, 5, 6, 7], "at once"


def test_a_store_that_is_lost_ends_the_generator():
    far = FarStore(HashStore())
    open_tickets(far.store)
    tickets = Tickets(far, AsyncSchedule(), 80, 1)
    far.add = lambda *_: 1 / 0
    state = State(version=0, dropped=0)
    with pytest.raises(ZeroDivisionError):
        until(lambda: tickets.take(4, 0, 0, state))

"""The schedule: quotas equal verl's, tickets come in order, and a simulated stream never trains samples above the bound."""

import json
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl.weights.arrival import Announcements, Arrival
from torch.distributed import HashStore

from rl import parts
from rl.algorithm.metrics import staleness_metrics
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.ranges import check
from rl.samples.buffer import SampleBuffer
from rl.samples.control import ControlBlock, State
from rl.samples.group import Group, Response
from rl.samples.schedule import AsyncSchedule
from rl.samples.tickets import Tickets, open_tickets, started

pytestmark = pytest.mark.usefixtures("requests_at_once")


def group(ticket: int, versions: list[list[int]], scores=None) -> Group:
    """A group whose responses have tokens of these versions."""
    responses = [
        Response(np.zeros(len(v), np.int32), np.zeros(len(v), np.float32), np.array(v, np.int32), "stop", score)
        for v, score in zip(versions, scores or range(len(versions)), strict=True)
    ]
    return Group(ticket, np.zeros(2, np.int32), "demo", responses)


@pytest.mark.parametrize("threshold", [0, 0.1, 0.15, 0.25, 0.5, 0.7, 1, 1.5, 3])
@pytest.mark.parametrize("period", [1, 4])
def test_the_quota_is_verls(threshold, period):
    """verl: int((1 + threshold) * required * period) samples between two syncs, less what is left of the period before."""
    args = AsyncSchedule(ppo_mini_batch_size=10, train_batch_size=20, publish_every=period, staleness_threshold=threshold)
    hundredths = round(100 * threshold)  # in whole numbers: no rounding
    a_period = (100 + hundredths) * 20 * period // 100
    assert args.quota(0) == a_period
    for version in range(1, 6):
        in_flight = args.quota(version - 1) - 20 * period * version  # started before this sync and not yet trained
        assert args.quota(version) - args.quota(version - 1) == a_period - in_flight


def test_sync_and_one_step_off_are_settings_of_it():
    on_policy, one_off = AsyncSchedule(staleness_threshold=0), AsyncSchedule(staleness_threshold=1)
    for version in range(5):
        assert on_policy.quota(version) == 8 * (version + 1), "batch v is made by version v alone"
        assert one_off.quota(version) == 8 * (version + 2), "and with it the batch after"


def take_one(tickets: Tickets, version: int, dropped: int = 0) -> int | None:
    """Return the next ticket if it may start under the weights of this version, the newest."""
    return next(iter(tickets.take(1, 0, version, State(version=version, dropped=dropped))), None)


def test_a_ticket_that_may_not_start_is_kept_and_dropped_ones_make_room():
    store, args = HashStore(), AsyncSchedule(ppo_mini_batch_size=2, staleness_threshold=0)
    open_tickets(store)
    tickets = Tickets(store, args, total=5)
    assert [take_one(tickets, 0) for _ in range(4)] == [0, 1, None, None]
    assert take_one(tickets, 0, 1) == 2, "one was dropped"
    assert take_one(tickets, 0, 1) is None and take_one(tickets, 1, 1) == 3
    last = [take_one(tickets, 9, 1) for _ in range(3)]
    assert last == [4, 5, None], "5 will be trained and 1 was dropped: no more than 6 start"
    assert started(store) == 6


def test_two_generators_share_the_tickets():
    store, args = HashStore(), AsyncSchedule(ppo_mini_batch_size=4, staleness_threshold=0)
    open_tickets(store)
    a, b = Tickets(store, args, 8), Tickets(store, args, 8)
    assert [take_one(generator, 0) for generator in (a, b, b, a)] == [0, 1, 2, 3]
    assert take_one(a, 0) is None and take_one(b, 0) is None
    assert sorted(take_one(generator, 1) for generator in (a, a, b, a)) == [4, 5, 6, 7]


def test_no_generator_takes_what_is_the_others_share():
    """Three generators with slots for all: at threshold 0.5 twelve tickets may be under way, four of them on each."""
    store, args = HashStore(), AsyncSchedule(ppo_mini_batch_size=8, staleness_threshold=0.5)
    open_tickets(store)
    a, b, c = (Tickets(store, args, 80, engines=3) for _ in range(3))
    state = State(version=0, dropped=0)
    assert [len(a.take(99, 0, 0, state)), len(b.take(99, 0, 0, state)), len(c.take(3, 0, 0, state))] == [4, 4, 3]
    assert a.take(99, 4, 0, state) == [] and len(c.take(99, 3, 0, state)) == 1, "the last one is left for the third"
    assert len(a.take(99, 2, 1, State(version=1, dropped=0))) == 2, "two were sent, and the next version lets eight more start"


@settings(max_examples=200)
@given(
    engines=st.integers(1, 5),
    prompts=st.integers(1, 7),
    period=st.integers(1, 3),
    threshold=st.sampled_from([0, 0.1, 0.5, 1, 2]),
    seed=st.integers(0, 10**6),
)
def test_a_ticket_that_may_start_always_finds_a_generator_below_its_share(engines, prompts, period, threshold, seed):
    """Wherever tickets are being generated, and whatever the learners hold back."""
    random, store = np.random.default_rng(seed), HashStore()
    args = AsyncSchedule(ppo_mini_batch_size=prompts, publish_every=period, staleness_threshold=threshold)
    open_tickets(store)
    tickets, under_way = [Tickets(store, args, 10**6, engines) for _ in range(engines)], [0] * engines
    for version in range(30):
        for i in random.permutation(engines):
            under_way[i] += len(tickets[i].take(99, under_way[i], version, State(version=version, dropped=0)))
        assert started(store) == args.quota(version), "every ticket that may start has started"
        needed = (version + 1) * prompts * period  # to be trained before the next version
        while (left := needed - (started(store) - sum(under_way))) > 0:
            i = int(random.choice([i for i in range(engines) if under_way[i]]))
            under_way[i] -= int(random.integers(1, min(under_way[i], left) + 1))


def test_tickets_are_drawn_in_one_go_and_kept_until_they_may_start():
    asked = []

    class Store(HashStore):
        def add(self, key: str, amount: int) -> int:
            asked.append((key, amount))
            return super().add(key, amount)

    store, args = Store(), AsyncSchedule(ppo_mini_batch_size=4, staleness_threshold=0)
    open_tickets(store)
    tickets = Tickets(store, args, 8)
    assert tickets.take(3, 0, 0, State(version=0, dropped=0)) == [0, 1, 2]
    assert tickets.take(4, 0, 0, State(version=0, dropped=0)) == [3], "three more are there and may not start"
    assert tickets.take(4, 0, 1, State(version=1, dropped=0)) == [4, 5, 6, 7]
    assert [amount for key, amount in asked if key == "tickets/drawn"] == [0, 3, 4, 1]


def test_no_ticket_starts_any_more_when_the_run_stops():
    store = HashStore()
    open_tickets(store)
    assert Tickets(store, AsyncSchedule(), 8).take(1, 0, 0, State(version=0, dropped=0, stop=True)) == [] and not started(store)


def test_tickets_that_were_under_way_go_first_each_once():
    store, args = HashStore(), AsyncSchedule(ppo_mini_batch_size=8, staleness_threshold=0)
    open_tickets(store, drawn=12, again=[2, 5, 11])
    a, b = Tickets(store, args, 80), Tickets(store, args, 80)
    state = State(version=9, dropped=0)
    assert [a.take(2, 0, 9, state), b.take(3, 0, 9, state), a.take(2, 0, 9, state)] == [[2, 5], [11, 12, 13], [14, 15]]


def test_buffer_trains_the_oldest_first_and_takes_no_ticket_twice():
    buffer = SampleBuffer(AsyncSchedule(ppo_mini_batch_size=2))
    for ticket in (3, 1, 2):
        buffer.add(group(ticket, [[0], [0]]))
    assert [g.ticket for g in buffer.take(1)] == [1, 2] and buffer.take(2) is None
    for ticket in (1, 3):
        with pytest.raises(RuntimeError, match=f"ticket {ticket} arrived twice"):
            buffer.add(group(ticket, [[0], [0]]))


def test_zero_variance_groups_are_dropped_within_limits():
    buffer = SampleBuffer(AsyncSchedule(ppo_mini_batch_size=2), filter_groups=True, max_num_gen_batches=2)
    for ticket in range(6):
        buffer.add(group(ticket, [[0], [0]], scores=[1, 1]))
    assert buffer.dropped["filtered"] == 2, "one batch's worth is replaced"
    assert [g.ticket for g in buffer.take(1)] == [2, 3], "then the step takes what there is"
    buffer.add(group(6, [[0], [0]], scores=[0, 1]))
    assert buffer.account([], started=7).startswith("7 tickets started = 2 trained + 2 dropped + 3 in flight")
    with pytest.raises(RuntimeError, match="tickets were lost"):
        buffer.account([], started=8)


def test_a_stale_group_is_dropped_and_counted():
    buffer = SampleBuffer(AsyncSchedule(ppo_mini_batch_size=1, max_staleness=1))
    buffer.add(group(0, [[0, 1, 2], [2, 2]]))
    buffer.add(group(1, [[1, 2], [2, 2]]))
    assert [g.ticket for g in buffer.take(3)] == [1], "step 3 trains with version 2; a token of version 0 is 2 old"
    assert buffer.dropped["stale"] == 1


def test_waiting_needs_a_bound_that_the_schedule_can_keep():
    check(AsyncSchedule(staleness_threshold=1, max_staleness=1, on_stale="wait"))
    with pytest.raises(UserError, match=r"--on-stale wait cannot keep --max-staleness 1 with --staleness-threshold 1\.5"):
        check(AsyncSchedule(staleness_threshold=1.5, max_staleness=1, on_stale="wait"))


@pytest.mark.parametrize(
    ("flag", "value"), [("staleness_threshold", -1), ("publish_every", 0), ("max_staleness", -1), ("ring_mb", 0)]
)
def test_settings_that_cannot_work(flag, value):
    with pytest.raises(UserError, match=f"--{flag.replace('_', '-')} must be"):
        check(parts.make(AsyncSchedule, **{flag: value}))


class OnItsWay(Arrival):
    """Weights that arrive when the test says so."""

    def begin(self) -> None:
        self._coming = self._coming or Future()

    def arrive(self) -> None:
        if self._coming and not self._coming.done():
            self._coming.set_result(None)

    def take(self) -> None:
        self._coming = None

    def has(self, version: int, engine: int) -> bool:
        """Return whether this version has arrived, for an engine with weights of version `engine`."""
        return engine == version or bool(engine == version - 1 and self._coming and self._coming.done())


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32 - 1),
    required=st.integers(1, 4),
    period=st.integers(1, 3),
    threshold=st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2]),
    extra=st.integers(0, 2),
    stale=st.sampled_from(["drop", "wait", None]),
    flat=st.sampled_from([0.0, 0.3]),
    generators=st.integers(1, 3),
    overlaps=st.booleans(),
)
def test_no_token_older_than_the_bound_and_every_ticket_accounted_for(
    seed, required, period, threshold, extra, stale, flat, generators, overlaps
):
    """Simulates a stream: generators lag by chance, responses take any time, the learner runs when it can.
    overlaps: whether engines generate while they receive weights. Receiving takes any time, and the learner publishes the next
    version when the first generator has this one."""
    random = np.random.default_rng(seed)
    bound = None if stale is None else int(np.ceil(threshold)) + (extra if stale == "wait" else extra - 1)
    bound = bound if bound is None else max(0, bound)
    args = AsyncSchedule(
        ppo_mini_batch_size=required,
        publish_every=period,
        staleness_threshold=threshold,
        max_staleness=bound,
        on_stale=stale or "drop",
    )
    check(args)
    steps, store = 12, HashStore()
    buffer = SampleBuffer(args, filter_groups=flat > 0, max_num_gen_batches=5)
    open_tickets(store)
    tickets = [Tickets(store, args, steps * required) for _ in range(generators)]
    engines, running = [0] * generators, [[] for _ in range(generators)]  # versions; (ticket, versions of its tokens)
    arrivals, announced = [OnItsWay(lambda: None) for _ in engines], [Announcements(store) for _ in engines]
    control = ControlBlock(SimpleNamespace(store=store, role="learner", ranks=SimpleNamespace(is_main=True)))
    version, step, idle, waits = 0, 1, 0, False  # waits: to publish, until the version before has arrived at the first
    while step <= steps:
        idle += 1
        assert idle < 2000, "the stream stands still"
        g = int(random.integers(generators))
        control.update(version=version, dropped=buffer.dropped.total())
        newer = min(version, engines[g] + 1)
        if overlaps:
            if random.random() < 0.3:
                arrivals[g].arrive()
            newer = arrivals[g].newest(newer, engines[g], busy=bool(running[g]))
        state = announced[g].of(newer, control.state)
        if random.random() < 0.5:
            if state.version > engines[g]:
                arrivals[g].take()
            engines[g] = state.version  # swaps between two engine steps; unfinished responses continue
        while random.random() < 0.7 and len(running[g]) < 6:
            fresh = tickets[g].take(1, 0, engines[g], state)
            if not fresh:
                break
            running[g].append((fresh[0], []))
        for item in list(running[g]):
            item[1].append(engines[g])
            if random.random() < 0.3:
                running[g].remove(item)
                scores = [1, 1] if random.random() < flat else [0, 1]
                buffer.add(group(item[0], [item[1], item[1][-1:]], scores))
        if not waits and random.random() < 0.5 and (groups := buffer.take(step)) is not None:
            assert len(groups) == required
            if bound is not None:
                assert max(version - g.oldest for g in groups) <= bound
            waits = step % period == 0
            step, idle = step + 1, 0
        if waits and (not overlaps or arrivals[0].has(version, engines[0])):
            version, waits = version + 1, False
            buffer.published(version)
    unfinished = [ticket for of in running for ticket, _ in of]
    assert "in flight" in buffer.account(unfinished, started(store))
    assert buffer.trained == steps * required
    if stale == "wait":
        assert buffer.dropped["stale"] == 0


def test_a_run_that_ended_within_a_period_and_gets_more_steps_still_waits_for_old_groups():
    """It ended with version 3, after 10 steps in periods of 4, and resumes with version 2. What is filtered then lets more
    groups start under version 2 than had started when the run ended."""
    args = AsyncSchedule(ppo_mini_batch_size=2, publish_every=4, staleness_threshold=0.5, max_staleness=1, on_stale="wait")
    ended, buffer = SampleBuffer(args, filter_groups=True), SampleBuffer(args, filter_groups=True)
    for step in range(1, 11):
        for ticket in (2 * step - 2, 2 * step - 1):
            ended.add(group(ticket, [[args.version_at(step)]] * 2))
        assert ended.take(step)
        if args.publishes_after(step, total_steps=10):
            ended.published(args.version_at(step) + 1)
    assert buffer.restore(json.loads(json.dumps(ended.state())), [], drawn=20) == []
    buffer.published(2)

    def train(step: int, *tickets: int, version: int) -> list[int] | None:
        for ticket in tickets:
            buffer.add(group(ticket, [[version]] * 2))
        taken = buffer.take(step)
        return taken and [g.ticket for g in taken]

    for ticket in range(20, 24):
        buffer.add(group(ticket, [[2], [2]], scores=[1, 1]))  # makes room for 28 to 31
    assert buffer.dropped == {"filtered": 4}
    assert train(11, 24, 25, version=2) == [24, 25] and train(12, 26, 27, version=2) == [26, 27]
    buffer.published(3)
    assert train(13, 28, 29, version=2) == [28, 29]
    assert train(14, 32, 33, version=3) == [32, 33] and train(15, 34, 35, version=3) == [34, 35]
    assert train(16, 36, 37, version=3) is None, "30 and 31 may be as old as version 2: with step 17 it would be too late"
    assert train(16, 30, 31, version=2) == [30, 31]


def test_ages_at_training():
    batch = Batch.of([group(0, [[2, 2, 3], [3]]), group(1, [[3, 3], [1, 1, 2]])])
    metrics = staleness_metrics(batch, version=3)
    assert metrics["staleness/max"] == 2 and metrics["staleness/mean"] == pytest.approx((1 + 1 + 2 + 2 + 1) / 9)
    assert metrics["staleness/age_0"] == pytest.approx(4 / 9) and metrics["staleness/age_2"] == pytest.approx(2 / 9)
    assert sum(v for k, v in metrics.items() if k.startswith("staleness/age_")) == pytest.approx(1)
    assert metrics["fully_async/count/stale_samples_processed"] == 2
    assert metrics["fully_async/count/stale_trajectory_processed"] == 2
    assert metrics["fully_async/partial/total_partial_num"] == 2
    assert metrics["fully_async/partial/partial_ratio"] == 0.5 and metrics["fully_async/partial/max_partial_span"] == 1
    assert torch.equal(batch.version, torch.tensor([2, 2, 3, 3, 3, 3, 1, 1, 2]))

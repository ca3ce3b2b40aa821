"""The schedule: quotas equal verl's, tickets come in order, and a simulated stream never trains samples above the bound. How
long the bound holds an idle generator is counted by hand, in simulated time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, ScriptedPool, engine_ranks, scripted_job
from torch.distributed import HashStore

import train_async
from rl import generator_loop, parts
from rl.algorithm.staleness import staleness_metrics
from rl.data.prompts import Prompt
from rl.generation.generator import Generator
from rl.learning.batch import Batch
from rl.ranges import check
from rl.samples.channel import ControlBlock, Outbox, State
from rl.samples.group import Group, Response
from rl.samples.schedule import NextTicket, SyncSchedule
from rl.samples.split_schedule import AsyncSchedule, OneStepOffSchedule
from rl.samples.stream import SampleBuffer
from rl.samples.tickets import Tickets, open_tickets, started


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
    assert args.quota(0) == a_period == SampleBuffer(args).metrics(0)["fully_async/count/max_required_samples"]
    for version in range(1, 6):
        in_flight = args.quota(version - 1) - 20 * period * version  # started before this sync and not yet trained
        assert args.quota(version) - args.quota(version - 1) == a_period - in_flight


def take_one(tickets: Tickets, version: int, dropped: int = 0) -> int | None:
    """Return the next ticket if it may start under the weights of this version, the newest."""
    return next(iter(tickets.take(1, 0, version, State(version=version, dropped=dropped))), None)


def test_the_last_step_publishes_too():
    schedule = AsyncSchedule(publish_every=4)
    published = [step for step in range(1, 11) if schedule.publishes_after(step, 10)]
    assert published == [4, 8, 10] == [schedule.step_of(version, 10) for version in (1, 2, 3)]
    assert [schedule.version_at(step) for step in (1, 4, 5, 9, 10)] == [0, 0, 1, 2, 2]


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


def test_no_generator_takes_what_is_the_others_share():
    """Three generators with slots for all: at threshold 0.5 twelve tickets may be under way, four of them on each."""
    store, args = HashStore(), AsyncSchedule(ppo_mini_batch_size=8, staleness_threshold=0.5)
    open_tickets(store)
    a, b, c = (Tickets(store, args, 80, engines=3) for _ in range(3))
    state = State(version=0, dropped=0)
    assert [len(a.take(99, 0, 0, state)), len(b.take(99, 0, 0, state)), len(c.take(3, 0, 0, state))] == [4, 4, 3]
    assert a.take(99, 4, 0, state) == [] and len(c.take(99, 3, 0, state)) == 1, "the last one is left for the third"
    assert len(a.take(99, 2, 1, State(version=1, dropped=0))) == 2, "two were sent, and the next version lets eight more start"


@settings(max_examples=100)
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


def test_tickets_passed_are_those_neither_in_the_batch_nor_under_way():
    tickets = NextTicket()
    assert [*tickets.begin(5)] == [0, 1, 2, 3, 4]
    assert tickets.advance(6, [group(0, [[0]]), group(5, [[0]])], under_way=[2, 3]) == [1, 4]
    assert tickets.advance(8, [group(2, [[0]]), group(6, [[0]])]) == [3, 7]


def test_buffer_trains_the_oldest_first_and_takes_no_ticket_twice():
    buffer = SampleBuffer(AsyncSchedule(ppo_mini_batch_size=2))
    for ticket in (3, 1, 2):
        buffer.add(group(ticket, [[0], [0]]))
    assert [g.ticket for g in buffer.take(1)] == [1, 2] and not buffer.next(2)
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


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    required=st.integers(1, 4),
    period=st.integers(1, 3),
    threshold=st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2]),
    bound=st.sampled_from([None, 0, 1, 2, 3]),
    flat=st.sampled_from([0.0, 0.3]),
    generators=st.integers(1, 3),
)
def test_no_token_older_than_the_bound_and_every_ticket_accounted_for(
    seed, required, period, threshold, bound, flat, generators
):
    """Simulates a stream: generators lag by chance, responses take any time, the learner runs when it can. Each generator takes
    the versions one by one, and may be several behind."""
    random = np.random.default_rng(seed)
    args = AsyncSchedule(ppo_mini_batch_size=required, publish_every=period, staleness_threshold=threshold, max_staleness=bound)
    check(args)
    steps, store = 12, HashStore()
    buffer = SampleBuffer(args, filter_groups=flat > 0, max_num_gen_batches=5)
    open_tickets(store)
    tickets = [Tickets(store, args, steps * required) for _ in range(generators)]
    engines, running = [0] * generators, [[] for _ in range(generators)]  # versions; (ticket, versions of its tokens)
    control = ControlBlock(SimpleNamespace(store=store, role="learner", ranks=SimpleNamespace(is_main=True)))
    version, step, idle = 0, 1, 0
    while step <= steps:
        idle += 1
        assert idle < 2000, "the stream stands still"
        g = int(random.integers(generators))
        control.update(version=version, dropped=buffer.dropped.total())
        if random.random() < 0.5:
            engines[g] = min(version, engines[g] + 1)  # between two engine steps; unfinished responses continue
        while random.random() < 0.7 and len(running[g]) < 6:
            fresh = tickets[g].take(1, 0, engines[g], control.state)
            if not fresh:
                break
            assert threshold or fresh[0] < (version + 1) * required * period + buffer.dropped.total()
            running[g].append((fresh[0], []))
        for item in list(running[g]):
            item[1].append(engines[g])
            if random.random() < 0.3:
                running[g].remove(item)
                scores = [1, 1] if random.random() < flat else [0, 1]
                buffer.add(group(item[0], [item[1], item[1][-1:]], scores))
        if random.random() < 0.5 and buffer.next(step):
            groups = buffer.take(step)
            assert len(groups) == required
            age = max(version - g.oldest for g in groups)
            assert bound is None or age <= bound
            assert age == 0 or args.trains_stale
            version += step % period == 0
            step, idle = step + 1, 0
    unfinished = [ticket for of in running for ticket, _ in of]
    assert "in flight" in buffer.account(unfinished, started(store))
    assert buffer.trained == steps * required


def test_what_a_buffer_saves_says_which_tickets_were_under_way():
    buffer, again = (SampleBuffer(AsyncSchedule(ppo_mini_batch_size=2), filter_groups=True) for _ in range(2))
    for ticket, scores in ((0, [0, 1]), (3, [0, 1]), (1, [1, 1]), (5, [0, 1])):
        buffer.add(group(ticket, [[0], [0]], scores))
    assert [g.ticket for g in buffer.take(1)] == [0, 3]
    assert again.restore(buffer.state(), [*buffer.waiting.values()], drawn=8) == [2, 4, 6, 7]
    assert again.dropped == {"filtered": 1} and [*again.waiting] == [5] and again.trained == 2
    with pytest.raises(RuntimeError, match="ticket 3 arrived twice"):
        again.add(group(3, [[0], [0]]))


def test_a_buffer_that_is_restored_drops_as_many_flat_groups_as_were_left_to_its_step():
    buffer, again = (SampleBuffer(AsyncSchedule(ppo_mini_batch_size=2), True, max_num_gen_batches=2) for _ in range(2))
    buffer.add(group(0, [[0], [0]], scores=[1, 1]))
    again.restore(buffer.state(), [], drawn=1)
    for ticket in (1, 2):
        again.add(group(ticket, [[0], [0]], scores=[1, 1]))
    assert again.dropped["filtered"] == 2 and [*again.waiting] == [2]


@pytest.mark.parametrize(
    ("schedule", "stale", "version", "publishes"),
    [
        (SyncSchedule(), False, 9, True),
        (SyncSchedule(over_sample=0.5), True, 9, True),
        (OneStepOffSchedule(), True, 9, True),
        (AsyncSchedule(staleness_threshold=0), False, 9, True),
        (AsyncSchedule(staleness_threshold=0, publish_every=4), True, 2, False),
        (AsyncSchedule(staleness_threshold=0.1), True, 9, True),
    ],
)
def test_what_a_run_asks_of_its_schedule(schedule, stale, version, publishes):
    assert schedule.trains_stale == stale and schedule.version_at(10) == version
    assert schedule.publishes_after(10, 12) == publishes and schedule.publishes_after(12, 12)
    assert schedule.step_of(2, 12) == (8 if version == 2 else 2) and schedule.step_of(99, 12) == 12
    assert schedule.split == (type(schedule) is not SyncSchedule) and schedule.surplus == 4 * (schedule.over_sample > 0)


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


# ------------------------------------------------------------------------------------------------------------ held by the bound

TOKEN = 0.02  # seconds of a token; a sleep of the loop is a tenth of it
TINY = 1e-6  # seconds of the loop's own round
LEARNS = 5 * TOKEN  # seconds of a step


class World:
    """A generator and a learner on one clock. The learner trains the oldest groups, and publishes after each step. A response
    is one token."""

    def __init__(self, args, steps: int):
        self.args, self.steps = args, steps
        self.now, self.reports, self.arrived = 0.0, [], 0
        self.store, self.version, self.busy_until = HashStore(), 0, None
        self.store.set("validated", "-1")
        open_tickets(self.store)
        world = self

        class Engine(ScriptedEngine):
            def step(self):
                world.now += TOKEN
                return super().step()

        self.engine = Engine(lambda request: ([1], [-1.0]), eos_token_id=1)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> State:
        """As the ControlBlock. The learner does all that it does until now."""
        if self.busy_until is not None and self.now >= self.busy_until:
            self.version, self.busy_until = self.version + 1, None
        if self.busy_until is None and self.version < self.steps and self.arrived >= self.args.schedule.prompts_per_step:
            self.arrived -= self.args.schedule.prompts_per_step
            self.busy_until = self.now + LEARNS
        self.now += TINY
        return State(version=self.version, dropped=0, stop=self.version == self.steps)

    def run(self, patch) -> list[tuple[float, float]]:
        """Runs the generator until its end; returns of each report the parts of the time that it was held, and idle."""
        world, args = self, self.args

        class Out(Outbox):
            def __init__(self, *_):
                pass

            def send_group(self, group):
                world.arrived += 1

            def report(self, timer, received):
                world.reports.append((timer.seconds.get("held", 0.0) / timer.elapsed, timer.ledger()["wait"]))
                timer.restart()

            def flush(self):
                pass

            def finish(self, unfinished):
                pass

        def receive(version, recompute):
            world.engine.update((), version)

        subscriber = SimpleNamespace(received=1, step=0, due=lambda announced: announced, receive=receive)
        pool, job = ScriptedPool(), scripted_job(Prompt([0, 0], "", "demo", "1", {}, ""), total_steps=self.steps)
        patch.setattr("rl.ranks.timers.time", SimpleNamespace(perf_counter=lambda: world.now))
        patch.setattr("rl.generation.generator.time", SimpleNamespace(sleep=world.sleep))
        patch.setattr(generator_loop, "make_generator", lambda *_: Generator(world.engine, job, pool, args, engine_ranks()))
        patch.setattr(generator_loop, "ScoringPool", lambda _: pool)
        patch.setattr(generator_loop, "ControlBlock", lambda _: self)
        patch.setattr(generator_loop, "Outbox", Out)
        patch.setattr(generator_loop, "Subscriber", lambda *_: subscriber)
        train_async.generate(args, SimpleNamespace(store=self.store, ranks=None, generators=1), job)
        return self.reports


def test_held_by_the_bound_worked_out_by_hand(monkeypatch):
    """Two prompts a step, half a period ahead: three samples may be under way, each a token long. A step is learned in the
    time of 5 tokens.

    0-3: tickets 0, 1, 2; the learner takes two at 2 and publishes at 7: 4 of 7 are held. Then two more may start, made
    until 9; the learner has two again at 8 and publishes at 13: 4 of 6. In the last period one ticket is left (six in all),
    made until 14: then nothing is left to do, and waiting for the end is not for the bound."""
    flags = {"rollout_n": 1, "max_num_seqs": 1, "test_freq": -1, "ppo_mini_batch_size": 2, "staleness_threshold": 0.5}
    _, *reports = World(parts.make(train_async.Args, **flags), steps=3).run(monkeypatch)
    for found, expected in zip(zip(*reports, strict=True), ([4 / 7, 4 / 6, 0], [4 / 7, 4 / 6, 5 / 6]), strict=True):
        assert found == pytest.approx(expected, abs=0.03)


def test_tickets_say_why_none_starts():
    store, args = HashStore(), parts.make(train_async.Args, ppo_mini_batch_size=2, staleness_threshold=0)
    open_tickets(store)
    tickets = Tickets(store, args.schedule, total=4)

    def held(most: int, version: int, newest: int | None = None, stop: bool = False) -> bool:
        tickets.take(most, 0, version, State(version=version if newest is None else newest, dropped=0, stop=stop))
        return tickets.held

    assert not held(2, 0), "two started"
    assert held(2, 0), "newer weights have to come first"
    assert not held(0, 0), "no room in the engine"
    assert not held(2, 0, newest=1), "newer weights are there, and are about to be taken"
    assert not held(2, 0, stop=True)
    assert not held(2, 1), "two more started"
    assert not held(2, 1), "all four have started: none is left"

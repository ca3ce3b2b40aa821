"""Idle generators: how long the staleness bound held them, counted by hand and by another rule, in simulated time. The
generator's loop is train_async.py's own."""

from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine
from torch.distributed import HashStore

import train_async
from rl import generator_loop, parts
from rl.data.prompts import Prompt
from rl.generation.generator import Generator
from rl.ranks.timers import Timers
from rl.rewards.pool import Score
from rl.samples.buffer import SampleBuffer
from rl.samples.channel import Outbox, State
from rl.samples.stream import Stream
from rl.samples.tickets import Tickets, open_tickets, started

TOKEN = 0.02  # seconds of a token; a sleep of the loop is a tenth of it
TINY = 1e-6  # seconds of the loop's own round


class World:
    """A generator and a learner on one clock. The learner trains the oldest groups, for as long as `learn[step]` tokens take,
    and publishes."""

    def __init__(self, args, steps: int, lengths, learn, dropped=()):
        """lengths: tokens by ticket; dropped: tickets that the learner drops when they arrive."""
        self.args, self.steps, self.learn, self.drops = args, steps, learn, {*dropped}
        self.now, self.held, self.reports, self.arrived = 0.0, 0.0, [], []
        self.store, self.version, self.dropped, self.step, self.busy_until = HashStore(), 0, 0, 0, None
        self.total = steps * args.schedule.prompts_per_step
        self.store.set("validated", "-1")
        open_tickets(self.store)
        world, self.lengths = self, lengths

        class Engine(ScriptedEngine):
            def step(self):
                world.now += TOKEN
                return super().step()

        self.engine = Engine(lambda request: ([1] * world.lengths[request.id[0].number], [-1.0] * 99), eos_token_id=1)

    def sleep(self, seconds: float) -> None:
        """By another rule than the schedule's: all that this version's bound allows have started, and more will be trained."""
        period = self.args.schedule.prompts_per_step * self.args.schedule.publish_every
        allowed = int(period * (self.engine.version + 1 + Fraction(str(self.args.schedule.staleness_threshold))))
        before = started(self.store) - self.known
        self.held += seconds * (before == allowed < self.total)
        self.now += seconds

    def read(self) -> State:
        """The learner does all that it does until now."""
        while self._advance():
            pass
        self.now += TINY
        self.known = self.dropped
        return State(version=self.version, dropped=self.dropped, stop=self.step == self.steps)

    def _advance(self) -> bool:
        if self.busy_until is not None and self.now >= self.busy_until:
            self.step, self.busy_until = self.step + 1, None
            if self.step % self.args.schedule.publish_every == 0 or self.step == self.steps:
                self.version += 1
            return True
        if self.busy_until is None and self.step < self.steps and len(self.arrived) >= self.args.schedule.prompts_per_step:
            for _ in range(self.args.schedule.prompts_per_step):
                self.arrived.remove(min(self.arrived))
            self.busy_until = self.now + self.learn[self.step] * TOKEN
            return True
        return False

    def run(self, patch) -> list[dict]:
        """Runs the generator until its end; returns its reports."""
        world, args = self, self.args

        class Out(Outbox):
            def __init__(self, *_):
                pass

            def send_group(self, group):
                is_dropped = group.ticket in world.drops
                world.dropped += is_dropped
                world.arrived += [] if is_dropped else [group.ticket]

            def _send_json(self, kind, content):
                world.reports.append({"rank": 0, **content})

            def flush(self):
                pass

            def finish(self, unfinished):
                pass

        class Sub:
            def __init__(self, *_, **__):
                self.received, self.step = 1, 0

            def due(self, announced):
                return announced

            def receive(self, version, recompute):
                world.engine.update((), version)

        pool = SimpleNamespace(events=Counter(), pending=[], close=lambda: None)
        pool.submit = lambda key, *_: pool.pending.append((key, Score(1.0)))
        pool.poll = lambda: [pool.pending.pop() for _ in list(pool.pending)]
        shared = SimpleNamespace(is_leader=True, size=1, index=0, engines=1, agree=lambda decision: decision)
        prompt = Prompt([0, 0], "", "demo", "1", {}, "")
        job = SimpleNamespace(order=lambda ticket: (0, 0), prompts=[prompt], total_steps=self.steps)
        job.tokenizer = SimpleNamespace(decode=lambda ids, **_: "")
        patch.setattr("rl.ranks.timers.time", SimpleNamespace(perf_counter=lambda: world.now))
        patch.setattr("rl.generation.generator.time", SimpleNamespace(sleep=world.sleep))
        patch.setattr(generator_loop, "make_generator", lambda *_: Generator(world.engine, job, pool, args, shared))
        patch.setattr(generator_loop, "ScoringPool", lambda _: pool)
        patch.setattr(generator_loop, "ControlBlock", lambda _: self)
        patch.setattr(generator_loop, "Outbox", Out)
        patch.setattr(generator_loop, "Subscriber", Sub)
        train_async.generate(args, SimpleNamespace(store=self.store, ranks=None, generators=1), job)
        return self.reports


def flags(**more):
    usual = {"rollout_n": 1, "max_num_seqs": 1, "max_response_length": 99, "test_freq": -1, "ppo_mini_batch_size": 2}
    return parts.make(train_async.Args, **usual | more)


def metrics_of(reports: list[dict]) -> list[dict]:
    """Return the learners' metrics for each report."""
    samples = object.__new__(Stream)
    samples.inbox = SimpleNamespace(reports=[])
    found = []
    for report in reports:
        samples.inbox.reports.append(report | {"publish_seconds": 1.0})
        found.append(super(Stream, samples).metrics(1, Timers()))
    return found


def test_held_by_the_bound_worked_out_by_hand(monkeypatch):
    """Two prompts a step, half a period ahead: three samples may be under way, each a token long. A step is learned in the
    time of 5 tokens.

    0-3: tickets 0, 1, 2; the learner takes two at 2 and publishes at 7: 4 of 7 are held. Then two more may start, made
    until 9; the learner has two again at 8 and publishes at 13: 4 of 6. In the last period one ticket is left (six in all),
    made until 14: then nothing is left to do, and waiting for the end is not for the bound."""
    world = World(flags(staleness_threshold=0.5), steps=3, lengths=[1] * 99, learn=[5.0] * 3)
    rows = metrics_of(world.run(monkeypatch))
    assert [row["fully_async/rollouter/held_ratio"] for row in rows[1:]] == pytest.approx([4 / 7, 4 / 6, 0], abs=0.03)
    assert [row["fully_async/rollouter/idle_ratio"] for row in rows[1:]] == pytest.approx([4 / 7, 4 / 6, 5 / 6], abs=0.03)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    prompts=st.integers(1, 4),
    period=st.integers(1, 3),
    threshold=st.sampled_from([0, 0.25, 0.5, 1, 2]),
    slots=st.integers(1, 5),
)
def test_a_held_generator_differs_from_one_without_work(seed, prompts, period, threshold, slots):
    """Responses and steps of any length, and dropped samples, each of which lets another ticket start."""
    random, steps = np.random.default_rng(seed), 6
    args = flags(ppo_mini_batch_size=prompts, publish_every=period, staleness_threshold=threshold, max_num_seqs=slots)
    lengths = random.integers(1, 9, 99)
    dropped = random.choice(prompts * steps, random.integers(0, 3), replace=False)
    world = World(args, steps, lengths.tolist(), random.uniform(0.1, 30, steps).tolist(), dropped.tolist())
    with pytest.MonkeyPatch.context() as patch:
        reports = world.run(patch)
    assert sum(report["held"] for report in reports) == pytest.approx(world.held, abs=1e-6)
    for report in reports:
        assert 0 <= report["held"] <= report["ledger"]["wait"] * report["elapsed"] + 1e-9


def test_the_bound_of_the_first_seed_is_verls():
    """64 prompts a mini-batch, a publish after 4 steps, 0.2 of a period ahead: int(64 * 1.2 * 4)."""
    args = parts.make(train_async.Args, ppo_mini_batch_size=64, publish_every=4, staleness_threshold=0.2)
    assert SampleBuffer(args.schedule).metrics(started=0)["fully_async/count/max_required_samples"] == 307


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

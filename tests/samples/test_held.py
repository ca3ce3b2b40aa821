"""Idle generators: how long the staleness bound held them, counted by hand, in simulated time. The generator's loop is
train_async.py's own."""

from types import SimpleNamespace

import pytest
from scripted import ScriptedEngine, ScriptedPool, engine_ranks, scripted_job
from torch.distributed import HashStore

import train_async
from rl import generator_loop, parts
from rl.data.prompts import Prompt
from rl.generation.generator import Generator
from rl.samples.channel import Outbox, State
from rl.samples.tickets import Tickets, open_tickets

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

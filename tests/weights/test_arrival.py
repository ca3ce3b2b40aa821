"""Weights arrive while the engine generates: real publishes over sockets, which the tests delay."""

import gc
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from test_bridge import together
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM

from rl.generation.embedded.engine import TransformersEngine
from rl.generation.engine import Output, Request, SamplingParams
from rl.learning.learner import Outgoing
from rl.ranks import failures
from rl.samples.control import ControlBlock, State
from rl.transport.bridge import Bridge
from rl.weights import arrival, buckets
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber

PROMPT, ALL = [5, 6, 7], 10**6


class Held:
    """The learner's end of a bridge. It sends messages only when the test allows it."""

    window = 1

    def __init__(self, bridge: Bridge):
        self.bridge, self.device, self._let, self._changed = bridge, bridge.device, 0, threading.Condition()

    def let(self, messages: int) -> None:
        with self._changed:
            self._let = messages
            self._changed.notify_all()

    def broadcast(self, data: torch.Tensor):
        with self._changed:
            assert self._changed.wait_for(lambda: self._let > 0, timeout=300)
            self._let -= 1
        return self.bridge.broadcast(data)


class Ends:
    """A learner whose weights the test changes on one node, and generators on another."""

    def __init__(self, model: str, generators: int = 1):
        store, node_of = HashStore(), [0, *[1] * generators]
        bridges, self._random = [None] * len(node_of), torch.Generator().manual_seed(0)

        def join(place: int) -> None:
            bridges[place] = Bridge.over_host(store, place, node_of, timedelta(seconds=300))

        together([partial(join, place) for place in range(len(node_of))])
        self.engines, self.held = [TransformersEngine(model, max_length=64) for _ in range(generators)], Held(bridges[0])
        self.engine = self.engines[0]
        self.parameters = {name: p.clone() for name, p in self.engine.model.named_parameters()}
        shapes = {name: list(p.shape) for name, p in self.parameters.items()}
        learner = SimpleNamespace(outgoing=lambda: Outgoing(shapes, frozenset(), lambda *_: self.parameters.items()))
        place = SimpleNamespace(device=torch.device("cpu"), is_main=True)
        common = {"store": store, "ranks": place, "senders": (0,)}
        common |= {"here": SimpleNamespace(generators=generators), "node": 1}
        self.learners = SimpleNamespace(bridge=self.held, role="learner", **common)
        self.publisher = Publisher(learner, self.learners, torch.float32)
        splits = [SimpleNamespace(bridge=bridges[i], is_first_here=i == 1, **common) for i in range(1, len(node_of))]
        self.subscribers = [Subscriber(*ends, overlaps=True) for ends in zip(splits, self.engines, strict=True)]
        self.subscriber = self.subscribers[0]

    def begin(self) -> "Ends":
        """Start with a generator that has the first version."""
        self.publish(0)
        self.held.let(ALL)
        assert self.subscriber.effective_state(State(0, dropped=1), busy=True).version == 0, "no version to generate with"
        self.subscriber.receive(0)
        self.publisher.wait()
        return self

    def publish(self, version: int) -> dict[str, torch.Tensor]:
        """Change every hundredth weight and publish, without sending anything yet. Return the weights."""
        self.held.let(0)
        for tensor in self.parameters.values():
            some = tensor.view(-1)[version % 100 :: 100]
            some += 0.5 * torch.randn(some.shape, generator=self._random)
        self.publisher.publish(version)
        return {name: tensor.clone() for name, tensor in self.parameters.items()}

    def holds(self, expected: dict[str, torch.Tensor], generator: int = 0) -> bool:
        return all(torch.equal(self.engines[generator].read_back(name), tensor) for name, tensor in expected.items())


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 14)
    monkeypatch.setattr(buckets, "LEAST_BYTES", 1 << 10)


def log_probs(model: str, state: dict[str, torch.Tensor], output: Output) -> torch.Tensor:
    """Return the log-probs of the response's tokens, [n], from transformers' own forward pass with these weights."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert set(reference.load_state_dict(state, strict=False).missing_keys) <= {"lm_head.weight"}
    ids = torch.tensor([[*PROMPT, *output.token_ids]])
    with torch.no_grad():
        rows = reference(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    return rows.gather(1, ids[0, len(PROMPT) :, None]).squeeze(1)


@pytest.mark.timeout(900)
def test_a_token_is_sampled_with_the_weights_whose_version_it_carries(models):
    rng, model = random.Random(0), models["qwen2-tied"]
    ends = Ends(model).begin()
    engine, subscriber, held = ends.engine, ends.subscriber, ends.held
    published = {0: {name: tensor.clone() for name, tensor in ends.parameters.items()}}
    for number in range(2):
        engine.add(Request(number, PROMPT, SamplingParams(max_tokens=40, ignore_eos=True), seed=number))
    done, sampled_with = [], []
    for version in range(1, 5):
        published[version], state = ends.publish(version), State(version, dropped=0)
        held.let(rng.randrange(3))
        for _ in range(rng.randrange(2, 6)):  # steps while the weights are on their way
            assert subscriber.effective_state(state, busy=True).version == engine.version == version - 1
            sampled_with.append(version - 1)
            done += engine.step()
        held.let(ALL)
        until(lambda state=state: subscriber.effective_state(state, busy=True).version == state.version)
        assert ends.holds(published[version - 1]), "until it is taken"
        sampled_with.append(version - 1)
        done += engine.step()
        subscriber.receive(version, recompute_kv=True)
        assert ends.holds(published[version]) and engine.version == version
        ends.publisher.wait()
    assert subscriber.received["bytes"] == sum(p.nbytes for p in published[0].values()) and subscriber.received["way"] > 0
    while engine.num_unfinished:
        done += engine.step()
    for output in done:
        versions = torch.tensor(output.versions)
        assert output.versions[1 : 1 + len(sampled_with)] == sampled_with[: len(output.versions) - 1] or (
            output.versions[: len(sampled_with)] == sampled_with
        )
        found = torch.tensor(output.log_probs)
        for version, state in published.items():
            differs = (log_probs(model, state, output) - found).abs()
            assert differs[versions == version].max() < 1e-3
            assert differs[versions != version].mean() > 1e-2, "else the check would say nothing"


@pytest.mark.timeout(900)
def test_what_was_said_with_weights_counts_from_when_they_are_here(models):
    """Also if the next version is announced before these weights are taken. Values that do not belong to the weights count at
    once."""
    ends = Ends(models["qwen2-tied"]).begin()
    subscriber, held = ends.subscriber, ends.held
    said = [
        State(0, dropped=1),
        State(1, dropped=3, step=4),
        State(2, dropped=5, step=8, snapshot=4),
    ]
    now = lambda number: subscriber.effective_state(said[number], busy=True)  # noqa: E731
    counts = lambda number: (now(number).version, now(number).dropped, now(number).step)  # noqa: E731
    assert now(0) == said[0]

    first = ends.publish(1)
    held.let(1)
    assert counts(1) == (0, 1, 0)
    held.let(ALL)
    until(lambda: now(1).version == 1)
    assert now(1) == said[1]
    second = ends.publish(2)  # which has to wait until the first one is taken
    assert counts(2) == (1, 3, 4) and now(2).snapshot == 4
    subscriber.receive(now(2).version)
    assert ends.holds(first)
    assert counts(2) == (1, 3, 4)
    held.let(ALL)
    until(lambda: now(2).version == 2)
    assert now(2) == said[2]
    subscriber.receive(2)
    assert ends.holds(second)
    ends.publisher.wait()


@pytest.mark.timeout(900)
def test_a_generator_with_nothing_to_do_waits_for_the_weights(models):
    ends = Ends(models["qwen2-tied"]).begin()
    published = ends.publish(1)
    assert ends.subscriber.effective_state(State(1, dropped=0), busy=False).version == 1
    threading.Timer(0.2, ends.held.let, [ALL]).start()
    ends.subscriber.receive(1)
    assert ends.holds(published)
    ends.publisher.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("begins", ["with the first", "late"])
@pytest.mark.parametrize("room", ["overlaps", "waits"])
def test_a_neighbour_that_does_not_look_for_two_versions_takes_each(models, monkeypatch, begins, room):
    """The learner continues when the node's first generator has a version. Each version keeps the state announced with it."""
    monkeypatch.setattr(buckets, "LEAST_BYTES", 1 << 30)  # a bucket and a table: two versions fit into the shared memory
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 30)
    free = iter([2**40 if room == "overlaps" else 0, 0, 2**40])  # it changes while the generators start
    monkeypatch.setattr(arrival, "available_memory", lambda: next(free))
    ends = Ends(models["qwen2-tied"], generators=2)
    control, (first, neighbour) = ControlBlock(ends.learners), ends.subscribers
    expected = {}

    def announce(version: int) -> None:
        expected[version] = ends.publish(version)
        ends.held.let(ALL)
        control.update(version=version, dropped=10 * version, step=4 * version)

    def take(number: int) -> None:
        subscriber = ends.subscribers[number]
        version = subscriber.engine.version + 1
        until(lambda: subscriber.effective_state(control.state, busy=True).version == version)
        state = subscriber.effective_state(control.state, busy=True)
        assert (state.dropped, state.step, state.snapshot) == (10 * version, 4 * version, control.state.snapshot)
        subscriber.receive(state.version)
        assert subscriber.engine.version == version and ends.holds(expected[version], number)

    announce(0)
    take(0)
    if begins == "with the first":
        take(1)
    last = neighbour.engine.version + 2
    for version in range(1, last + 1):
        announce(version)
        take(0)
    control.update(snapshot=7)
    for _ in range(neighbour.engine.version, last):
        take(1)
    ends.publisher.wait()
    state = State(last, 10 * last, snapshot=7, step=4 * last)
    assert first.effective_state(control.state, busy=True) == neighbour.effective_state(control.state, busy=True) == state


@pytest.mark.timeout(900)
def test_a_generator_that_stops_takes_what_was_announced(models):
    ends = Ends(models["qwen2-tied"]).begin()
    ends.publish(1)
    assert ends.subscriber.effective_state(State(1, dropped=0), busy=True).version == 0
    assert ends.subscriber.effective_state(State(1, dropped=0, stop=True), busy=True).version == 1, "and waits for it"


@pytest.mark.parametrize(("size", "pins", "most"), [(3000, False, 3000), (3000, True, 4096), (4096, True, 4096)])
def test_room_is_counted_for_all_generators_of_a_node_as_torch_takes_it(monkeypatch, capsys, size, pins, most):
    for number, spare in enumerate([0, -1]):
        store, here = HashStore(), SimpleNamespace(generators=3)
        monkeypatch.setattr(arrival, "available_memory", lambda spare=spare: (3 * most + spare) / arrival.SPARE)
        first, other = (SimpleNamespace(store=store, node=1, here=here, is_first_here=is_first) for is_first in (True, False))
        assert [arrival.has_room(split, size, pins) for split in (first, other)] == [not number] * 2
        assert bool(capsys.readouterr().err) == bool(number)


@pytest.mark.timeout(900)
def test_weights_that_are_not_what_was_sent_are_noticed(models):
    ends = Ends(models["qwen2-tied"]).begin()
    ends.publish(1)
    ends.held.let(ALL)
    until(lambda: ends.subscriber.effective_state(State(1, dropped=0), busy=True).version == 1)
    ends.subscriber._memory[-1] += 1
    with pytest.raises(RuntimeError, match=r"version 1: the generator's .* is not what the learner sent"):
        ends.subscriber.receive(1)


@pytest.mark.timeout(900)
def test_a_sender_that_dies_midway_ends_a_busy_generator(models):
    ends = Ends(models["qwen2-tied"]).begin()
    group, state = ends.held.bridge.group, State(1, dropped=0)
    ends.held.bridge.broadcast(torch.zeros(ends.subscriber.plan.buckets[0].size))
    assert ends.subscriber.effective_state(state, busy=True).version == 0
    ends.held.bridge.group = None
    del group
    gc.collect()  # its connections close
    with pytest.raises(RuntimeError) as error:
        until(lambda: ends.subscriber.effective_state(state, busy=True).version == 1)
    assert failures.lost_connection(error.value), "such an error has the lost rank named"


@pytest.mark.timeout(900)
def test_without_memory_for_it_the_engine_waits(models, monkeypatch, capsys):
    monkeypatch.setattr(arrival, "available_memory", lambda: 4 * (64 * 1024))
    ends = Ends(models["qwen2-tied"]).begin()
    assert "generators wait while new weights arrive" in capsys.readouterr().err
    published = ends.publish(1)
    assert ends.subscriber.effective_state(State(1, dropped=0), busy=True).version == 1, "it is received at once"
    ends.held.let(ALL)
    ends.subscriber.receive(1)
    assert ends.holds(published)
    ends.publisher.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_share_an_engine_take_the_weights_at_the_same_step(demo_model, tmp_path, network):
    """The link is slow: weights take longer than a batch of responses."""
    machines = network(2)
    machines.nodes[1].shape(20)
    flags = ["--total-training-steps", 6, "--test-freq", 3, "--rollout-tp", 2, "--output-dir", tmp_path / "run"]
    flags += ["--ignore-eos", "--max-response-length", 48]
    line = [ROOT / "tests/programs/steps_meanwhile.py", tmp_path, *flags, "--generators"]
    consoles = machines.start([(1, [*line, 0]), (2, [*line, 2])]).wait(600)
    assert [code for code, _ in consoles] == [0, 0], "\n----\n".join(text for _, text in consoles)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert [version for version, _ in first["steps"]] == [version for version, _ in second["steps"]]
    assert first["responses"] == second["responses"]
    assert any(announced > version for version, announced in first["steps"]), "steps while weights were on their way"
    assert {version for version, _ in first["steps"]} >= {0, 1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_learner_that_is_killed_while_its_weights_are_on_their_way_is_named(demo_model, tmp_path, network):
    machines = network(2)
    machines.nodes[1].shape(8)  # 4 s a publish
    flags = ["train_async.py", "--test-freq", 0, "--output-dir", tmp_path, "--node-timeout", 5, "--generators"]
    job = machines.start([(1, [*flags, 0]), (1, [*flags, 1])])
    until(lambda: "step 1/" in job.console(0) or job.processes[0].poll() is not None)
    os.kill(machines.nodes[0].ranks()[0], signal.SIGKILL)
    (first, _), (second, console) = job.wait(300)
    assert first and second
    assert re.search("rank 0 on node1 no longer answer|node1, has not answered for 5 s", console), console

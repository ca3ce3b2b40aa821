"""A publish to distant generators takes the time of its bytes and a few round trips, for any model.

The real ends on a link in simulated time. A message leaves when both ends have asked for it, as gloo sends: the word that it
can be received takes half a round trip, and so does the message. Times are in round trips, lengths in buckets.
"""

import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from rl.learning.learner import Outgoing
from rl.transport import bridge
from rl.weights import buckets
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber

BUCKET = 4096  # bytes
RATE = 20  # buckets that the link carries in a round trip: of 32 MB in 50 ms, 100 Gbit/s


class Link:
    """Both ends call `of(end).broadcast`, the sender's first in order; clocks hold each end's time."""

    def __init__(self):
        self.clock, self.free = [0.0, 0.0], 0.0
        self.asked: dict[int, dict[int, tuple[float, torch.Tensor]]] = defaultdict(dict)  # by message, by end
        self.times: dict[int, tuple[float, float]] = {}  # of each message: when its sender is done with it, when it arrives
        self.changed = threading.Condition()

    def of(self, end: int) -> "End":
        return End(self, end)

    def ask(self, number: int, end: int, data: torch.Tensor) -> None:
        with self.changed:
            self.asked[number][end] = self.clock[end], data
            while len(self.asked[len(self.times)]) == 2:
                (sent, source), (wanted, target) = (self.asked[len(self.times)][e] for e in (0, 1))
                assert source.nbytes == target.nbytes
                target.view(-1).view(torch.uint8).copy_(source.reshape(-1).view(torch.uint8))
                self.free = max(self.free, sent, wanted + 0.5) + source.nbytes / BUCKET / RATE
                self.times[len(self.times)] = self.free, self.free + 0.5
            self.changed.notify_all()

    def wait(self, number: int, end: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.times, timeout=60)
            self.clock[end] = max(self.clock[end], self.times[number][end])


class End:
    device, window = torch.device("cpu"), bridge.WINDOW

    def __init__(self, link: Link, end: int):
        self.link, self.end, self.count = link, end, 0

    def broadcast(self, data: torch.Tensor) -> SimpleNamespace:
        number, self.count = self.count, self.count + 1
        self.link.ask(number, self.end, data)
        return SimpleNamespace(wait=lambda: self.link.wait(number, self.end))


class Holder:
    """A learner or an engine as a publish sees it: parameters by name."""

    shares_memory, device, version = False, torch.device("cpu"), -1

    def __init__(self, sizes: list[int], shares_memory: bool):
        self.parameters = {f"p{i}": torch.randn(size) for i, size in enumerate(sizes)}
        self.shares_memory = shares_memory

    def outgoing(self) -> Outgoing:
        shapes = {name: list(tensor.shape) for name, tensor in self.parameters.items()}
        return Outgoing(shapes, frozenset(), lambda dtype, to, frozen: self.parameters.items())

    def share_parameters(self, tensors: dict[str, torch.Tensor]) -> None:
        self.parameters = tensors

    def update(self, incoming, version: int, recompute_kv: bool) -> None:
        self.parameters = {name: tensor if self.shares_memory else tensor.clone() for name, tensor in incoming}

    def read_back(self, name: str) -> torch.Tensor:
        return self.parameters[name]

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole


def a_publish(sizes: list[int], shares_memory: bool) -> tuple[float, float]:
    """(round trips until it is verified; buckets that were sent)."""
    link, store, ranks = Link(), HashStore(), SimpleNamespace(device=torch.device("cpu"), is_main=True)
    learner, engine = Holder(sizes, False), Holder(sizes, shares_memory)
    split = lambda end: SimpleNamespace(bridge=link.of(end), store=store, ranks=ranks, senders=(0,))  # noqa: E731
    publisher = Publisher(learner, split(0), torch.float32)
    subscriber = Subscriber(split(1), engine)
    publisher.publish(0)
    subscriber.receive(0)
    publisher.wait()
    assert all(torch.equal(engine.parameters[name], tensor) for name, tensor in learner.parameters.items())
    return link.clock[1], subscriber.received["bytes"] / BUCKET


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", BUCKET)
    monkeypatch.setattr(buckets, "LEAST_BYTES", BUCKET // 32)


MODELS = {  # elements of each parameter
    "few small parameters": [7, 100, 3],
    "many small parameters": [10] * 3000,
    "one large parameter": [700_000],
    "hundreds of buckets": [1000, 24, 30_000] * 20,
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_publish_adds_at_most_two_round_trips_to_its_bytes(model, shares_memory):
    took, sent = a_publish(MODELS[model], shares_memory)
    table = 8 * (1 + len(MODELS[model])) / BUCKET
    assert 1 <= took - (sent + table) / RATE <= 2


def test_where_messages_wait_for_each_other_it_is_noticed(monkeypatch):
    monkeypatch.setattr(End, "window", 3)
    took, sent = a_publish(MODELS["hundreds of buckets"], True)
    assert took - sent / RATE > 100


def test_what_an_engine_cannot_show_is_said_once(capsys, monkeypatch):
    """It ends no run; what the engine does show is compared all the same."""
    monkeypatch.setattr(Holder, "read_back", lambda self, name: None if name in ("p1", "p2") else self.parameters[name])
    link, store, ranks = Link(), HashStore(), SimpleNamespace(device=torch.device("cpu"), is_main=True)
    split = lambda end: SimpleNamespace(bridge=link.of(end), store=store, ranks=ranks, senders=(0,))  # noqa: E731
    publisher = Publisher(Holder([7, 100, 3], False), split(0), torch.float32)
    subscriber = Subscriber(split(1), engine := Holder([7, 100, 3], False))
    for version in range(2):
        publisher.publish(version)
        subscriber.receive(version)
        publisher.wait()
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "2 of 3 parameters, p1 first" in said
    monkeypatch.setattr(engine, "read_back", lambda name: None if name == "p1" else torch.zeros(3))
    publisher.publish(2)
    with pytest.raises(RuntimeError, match="p0 is not what the learner sent"):
        subscriber.receive(2)

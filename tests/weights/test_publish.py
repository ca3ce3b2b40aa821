"""A publish: a token carries the version of the weights that sampled it, versions are received in turn, every fault is named,
and distant generators wait for its bytes and a few round trips. On one rank frozen weights are gathered only once, and the
engine still has all weights."""

import gc
import random
import threading
import weakref
from collections import Counter
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_bridge import together
from test_engine import reference_log_probs
from test_vision import vlms  # noqa: F401  (a fixture)
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM

from rl.generation.embedded import TransformersEngine
from rl.generation.engine import Request, SamplingParams
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import stops
from rl.ranks.shards import local
from rl.setup import LocalWeights
from rl.transport import bridge
from rl.transport.bridge import Bridge
from rl.weights import publish
from rl.weights.publish import Publisher, Subscriber

CPU, PROMPT = torch.device("cpu"), [5, 6, 7]
PIECE = 4096  # bytes


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(publish, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(publish, "LEAST_BYTES", PIECE // 32)


def split_of(bridge, store: HashStore) -> SimpleNamespace:
    return SimpleNamespace(bridge=bridge, store=store, ranks=SimpleNamespace(device=CPU, is_main=True), senders=(0,))


class Holder:
    """A learner or an engine as a publish sees it: parameters by name. The last `frozen` ones never change."""

    device, version = CPU, -1

    def __init__(self, sizes: list[int], shares_memory: bool = False, frozen: int = 0):
        self.parameters = {f"p{i}": torch.randn(size) for i, size in enumerate(sizes)}
        self.shares_memory = shares_memory
        self.frozen = dict([*self.parameters.items()][len(sizes) - frozen :])

    def weights(self, dtype, to, frozen: bool):
        return [item for item in self.parameters.items() if frozen or item[0] not in self.frozen]

    def share_parameters(self, tensors: dict[str, torch.Tensor]) -> None:
        self.parameters = tensors

    def update(self, incoming, version: int, recompute_kv: bool) -> None:
        self.parameters = {name: tensor if self.shares_memory else tensor.clone() for name, tensor in incoming}
        self.version = version

    def read_back(self, name: str) -> torch.Tensor:
        return self.parameters[name]

    def own_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return whole


class Ends:
    """A learner on one node, and generators with these engines on another, over sockets and shared memory."""

    def __init__(self, learner: Holder, engines: list):
        store, node_of = HashStore(), [0, *[1] * len(engines)]
        self.bridges = [None] * len(node_of)

        def join(place: int) -> None:
            self.bridges[place] = Bridge.join(store, place, node_of, CPU, timedelta(seconds=300))

        together([partial(join, place) for place in range(len(node_of))])
        self.learner, self.engines = learner, engines
        self.publisher = Publisher(learner, split_of(self.bridges[0], store), torch.float32)
        self.subscribers = [
            Subscriber(split_of(*ends), engine)
            for *ends, engine in zip(self.bridges[1:], [store] * len(engines), engines, strict=True)
        ]

    def publish(self, version: int, step: int = 0) -> dict[str, torch.Tensor]:
        """Change every hundredth weight that is trained, and publish. Return all weights."""
        for tensor in [*self.learner.parameters.values()][: len(self.learner.parameters) - len(self.learner.frozen)]:
            some = tensor.view(-1)[version % 100 :: 100]
            some += 0.5 * torch.randn_like(some)
        self.publisher.publish(version, step)
        return {name: tensor.clone() for name, tensor in self.learner.parameters.items()}

    def holds(self, expected: dict[str, torch.Tensor], generator: int = 0) -> bool:
        return all(torch.equal(self.engines[generator].read_back(name), tensor) for name, tensor in expected.items())


def learner_of(engine: TransformersEngine) -> Holder:
    learner = Holder([])
    learner.parameters = {name: p.clone() for name, p in engine.model.named_parameters()}
    return learner


@pytest.mark.timeout(900)
def test_a_token_is_sampled_with_the_weights_whose_version_it_carries(models):
    model = models["qwen2-tied"]
    engine = TransformersEngine(model, max_length=64)
    ends, done, published = Ends(learner_of(engine), [engine]), [], {}
    for version in range(5):
        published[version] = ends.publish(version, step=3 * version)
        ends.subscribers[0].receive(version, recompute_kv=True)
        assert ends.holds(published[version]) and engine.version == version and ends.subscribers[0].step == 3 * version
        if not version:
            for number in range(2):
                engine.add(Request(number, PROMPT, SamplingParams(max_tokens=40, ignore_eos=True), seed=number))
        for _ in range(version + 2):
            done += engine.step()
    ends.publisher.wait()
    assert ends.subscribers[0].received == sum(p.nbytes for p in published[0].values())
    while engine.num_unfinished:
        done += engine.step()
    assert len(done) == 2
    reference = AutoModelForCausalLM.from_pretrained(model)
    for output in done:
        versions, found = torch.tensor(output.versions), torch.tensor(output.log_probs)
        assert {*output.versions} == {*range(5)} and output.versions == sorted(output.versions)
        for version, state in published.items():
            reference.load_state_dict(state, strict=False)  # the head is tied
            differs = (reference_log_probs(reference, PROMPT, output.token_ids, 1.0) - found).abs()
            assert differs[versions == version].max() < 1e-3
            assert differs[versions != version].mean() > 1e-2, "else the check would say nothing"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("first", [0, 3])
def test_a_neighbour_that_does_not_look_for_two_versions_takes_each(shares_memory, first):
    """The learner continues when the node's first generator has a version. What is never trained is sent once."""
    sizes = [7, 300, 4000, 50]
    ends = Ends(Holder(sizes, frozen=1), [Holder(sizes, shares_memory) for _ in range(2)])
    expected, (leader, neighbour) = {}, ends.subscribers
    for version in range(first, first + 3):
        expected[version] = ends.publish(version)
        assert leader.due(version) == version
        leader.receive(version)
        assert leader.due(version) == version and ends.holds(expected[version])
        assert leader.received == 4 * (sum(sizes) if version == first else sum(sizes[:-1]))
    for version in range(first, first + 3):
        assert neighbour.due(first + 2) == version
        neighbour.receive(version)
        assert neighbour.engine.version == version and ends.holds(expected[version], 1)
    ends.publisher.wait()


def test_weights_that_are_not_what_was_sent_are_named():
    ends = Ends(Holder([7, 300, 4000]), [Holder([7, 300, 4000], shares_memory=True)])
    (subscriber,) = ends.subscribers
    ends.publish(0)
    subscriber.receive(0)
    update = subscriber.engine.update

    def damaged(incoming, version: int, recompute_kv: bool) -> None:
        update(incoming, version, recompute_kv)
        subscriber.engine.parameters["p1"][0] += 1

    subscriber.engine.update = damaged
    ends.publish(1)
    with pytest.raises(RuntimeError, match="version 1: the generator's p1 is not what the learner sent"):
        subscriber.receive(1)
    ends.publish(2)
    subscriber.engine.update = update
    with pytest.raises(RuntimeError, match="the learner sent version 2 of the weights, version 5 is due"):
        subscriber.receive(5)


@pytest.mark.timeout(900)
def test_a_sender_that_dies_midway_ends_a_generator():
    ends = Ends(Holder([7, 300, 4000]), [Holder([7, 300, 4000])])

    def die() -> None:
        ends.bridges[0].broadcast(torch.zeros(ends.publisher.plan.pieces[0].stop)).wait()
        ends.bridges[0].group = None
        gc.collect()  # its connections close

    threading.Thread(target=die, daemon=True).start()
    with pytest.raises(RuntimeError) as error:
        ends.subscribers[0].receive(0)
    assert stops.lost_connection(error.value), "such an error has the lost rank named"


def test_what_an_engine_cannot_show_is_said_once(capsys, monkeypatch):
    """It ends no run; what the engine does show is compared all the same."""
    ends = Ends(Holder([7, 100, 3]), [Holder([7, 100, 3])])
    (engine,), (subscriber,) = ends.engines, ends.subscribers
    monkeypatch.setattr(engine, "read_back", lambda name: None if name in ("p1", "p2") else engine.parameters[name])
    for version in range(2):
        ends.publish(version)
        subscriber.receive(version)
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "2 of 3 parameters, p1 first" in said
    monkeypatch.setattr(engine, "read_back", lambda name: None if name == "p1" else torch.zeros(3))
    ends.publish(2)
    with pytest.raises(RuntimeError, match="the engine's p0 is not what the learner sent"):
        subscriber.receive(2)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("shares_memory", [True, False])
def test_no_message_waits_for_the_one_before_it(shares_memory, monkeypatch):
    """Far away each wait is a round trip: as many messages are under way as the window allows, at both ends."""
    sizes = [1000, 24, 30_000] * 20
    ends = Ends(Holder(sizes), [Holder(sizes, shares_memory)])
    now, counts = Counter(), ([], [])  # messages under way at each end; the same whenever one begins

    def begin(end: int, broadcast, data: torch.Tensor) -> SimpleNamespace:
        work = broadcast(data)
        now[end] += 1
        counts[end].append(now[end])
        return SimpleNamespace(wait=lambda: (work.wait(), now.subtract([end])))

    for end, own in enumerate(ends.bridges):
        monkeypatch.setattr(own, "broadcast", partial(begin, end, own.broadcast))
    ends.publish(0)
    ends.subscribers[0].receive(0)
    ends.publisher.wait()
    for of_end in counts:
        assert len(of_end) == len(ends.publisher.plan.pieces) + 1 > 4 * bridge.WINDOW
        assert bridge.WINDOW <= of_end[-1] <= max(of_end) <= bridge.WINDOW + 1


@pytest.mark.parametrize("seed", range(5))
def test_parameters_arrive_whole_wherever_the_pieces_end(seed):
    """Those that stay in fp32 come first, as the learner sends them."""
    chance = random.Random(seed)
    sizes = [chance.choice([1, 7, 2048, chance.randrange(1, 9000)]) for _ in range(40)]
    names = [f"{i}.linear_attn.A_log" if i < 5 else f"{i}.weight" for i in range(40)]
    plan = publish.PublishPlan(names, [[size] for size in sizes], torch.bfloat16)
    stream = torch.randint(0, 256, (2 * plan.offsets[-1],), dtype=torch.uint8).view(torch.bfloat16)
    arrived = [*plan.arriving(stream[piece].clone() for piece in plan.pieces)]
    assert max(stream[piece].nbytes for piece in plan.pieces) <= PIECE < stream.nbytes / 4
    for number, (value, whole) in enumerate(zip(arrived, plan.views(stream), strict=True)):
        assert value.dtype == (torch.float32 if number < 5 else torch.bfloat16) and value.shape == whole.shape
        assert torch.equal(value.view(torch.uint8), whole.view(torch.uint8))


def test_a_parameter_of_many_pieces_is_in_memory_once_while_the_engine_has_it():
    plan = publish.PublishPlan(["large", "small"], [[4 * PIECE], [8]], torch.bfloat16)
    alive = weakref.WeakSet()

    def pieces():
        for piece in plan.pieces:
            data = torch.zeros(piece.stop - piece.start, dtype=torch.bfloat16)
            alive.add(data)
            yield data
            del data

    for value in plan.arriving(pieces()):
        assert len(alive) <= 1 and value.numel() in (8, 4 * PIECE)  # one may hold what comes next


# ------------------------------------------------------------------------------------------------------------------ on one rank


class Whole:
    """An engine that, like vLLM, has its own copies and always receives all weights."""

    shares_memory = False

    def update(self, weights, version: int) -> None:
        self.given, self.version = {name: tensor.clone() for name, tensor in weights}, version

    def read_back(self, name: str) -> torch.Tensor:
        return self.given[name]


@pytest.mark.parametrize("own_memory", [False, True])
def test_a_frozen_tower_is_gathered_once(vlms, ranks, monkeypatch, own_memory):  # noqa: F811
    learner = Learner(vlms["qwen3-vl"], LearnerArgs(freeze_vision_tower=True), ranks, 10)
    engine = Whole() if own_memory else TransformersEngine(vlms["qwen3-vl"], max_length=64)
    gathered, weights = [], learner.weights

    def recorded(*given, **how):
        for name, tensor in weights(*given, **how):
            gathered[-1].add(name)
            yield name, tensor

    monkeypatch.setattr(learner, "weights", recorded)
    publishes = LocalWeights(learner, engine, torch.float32)
    for version in range(3):
        gathered.append(set())
        publishes.publish(version)
        for name, parameter in learner.parameters.items():
            assert torch.equal(engine.read_back(name), local(parameter)), name
        with torch.no_grad():
            for name, parameter in learner.parameters.items():
                if name not in learner.frozen:
                    local(parameter).add_(0.1)
    assert engine.version == 2 and gathered[0] == set(learner.parameters)
    assert (
        {name for name in gathered[0] if name.startswith("model.visual.")} == set(learner.frozen) == gathered[0] - gathered[1]
    )
    assert gathered[1] == gathered[2]

"""A learner's weights reach each of its generators bit for bit, and each node once, for any number of ranks and nodes."""

import random
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
import torch
from test_ring import LIMIT, kill, start
from torch.distributed import HashStore, TCPStore

from rl.errors import RankLost
from rl.ranks.launch import Node
from rl.transport import bridge
from rl.transport.bridge import Bridge, Rings, senders

LAYOUTS = [  # the node of the first learner, then of each generator
    [0, 0],
    [0, 1],
    [0, 0, 0, 0],
    [0, 1, 1, 1],
    [3, 0, 0, 3, 3, 7],
]
CPU = torch.device("cpu")
KINDS = [torch.float32, torch.bfloat16, torch.long, torch.uint8]


@pytest.fixture
def small_rings(monkeypatch):
    monkeypatch.setattr(bridge, "PIECE_BYTES", 1 << 14)
    monkeypatch.setattr(bridge, "RING_BYTES", 1 << 16)


def messages(seed: int) -> list[torch.Tensor]:
    """Messages of all lengths, from none to several pieces, with any bits."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [0, 1, *(rng.randrange(1, 3 * bridge.PIECE_BYTES // 8) * 8 for _ in range(10)), bridge.PIECE_BYTES]
    kinds = [rng.choice(KINDS) for _ in sizes]
    sizes = [size // kind.itemsize * kind.itemsize for size, kind in zip(sizes, kinds, strict=True)]
    drawn = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    return [data.view(kind) for data, kind in zip(drawn, kinds, strict=True)]


def together(acts: list) -> None:
    """Run each function in a thread, and raise an error that one of them raised."""
    errors = []

    def run(act) -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 300
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("node_of", LAYOUTS)
def test_every_message_arrives_to_the_bit(node_of, small_rings):
    store, sent = HashStore(), messages(seed=len(node_of))
    bridges, got = [None] * len(node_of), [[] for _ in node_of]

    def rank(place: int) -> None:
        rng = random.Random(place)
        own = bridges[place] = Bridge.join(store, place, node_of, CPU, timedelta(seconds=300))
        under_way = []
        for message in sent:
            data = message.clone() if place == 0 else torch.zeros_like(message)
            got[place].append(data)
            under_way.append(own.broadcast(data))
            if len(under_way) == rng.choice([1, 3]) or len(under_way) == 3:
                under_way.pop(0).wait()
            time.sleep(rng.choice([0, 0, 0.003]))
        for work in under_way:
            work.wait()

    together([partial(rank, place) for place in range(len(node_of))])
    for received in got:
        assert all(
            torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in zip(received, sent, strict=True)
        )
    on_network = [place for place, own in enumerate(bridges) if own.group]
    nodes = list(dict.fromkeys(node_of))
    assert on_network == ([node_of.index(node) for node in nodes] if len(nodes) > 1 else []), "one rank of each node"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("killed", ["the first", "a neighbour"])
def test_a_process_that_dies_is_noticed(killed, small_rings):
    """The processes that wait for it notice, without a timeout."""
    store = TCPStore("localhost", 0, None, True, wait_for_workers=False)
    number = 0 if killed == "a neighbour" else 1

    def other() -> None:
        Rings(TCPStore("localhost", store.port), 1 - number, 2)
        time.sleep(LIMIT)

    pid = start(other)
    own = Rings(TCPStore("localhost", store.port), number, 2)
    kill(pid)
    data = torch.zeros(5 * bridge.PIECE_BYTES, dtype=torch.uint8)
    with pytest.raises(RankLost, match=f"process {pid}"):
        own.put(data) if own.is_first else own.take(data)


SPLITS = [  # (learners, generators) of each node
    [(2, 3)],
    [(1, 0), (0, 2)],
    [(1, 1), (2, 2)],
    [(1, 2), (1, 0), (0, 2), (0, 1), (2, 1), (0, 1)],
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("of_nodes", SPLITS)
def test_each_generator_has_one_sender_on_its_own_node_if_learners_are_there(of_nodes, small_rings):
    nodes, store, got = [Node("", 0, learners + generators, generators) for learners, generators in of_nodes], HashStore(), {}

    def rank(number: int, local_rank: int) -> None:
        own = Bridge.of(senders(nodes), nodes, number, local_rank, store, CPU, timedelta(seconds=300))
        if local_rank < nodes[number].learners:
            if own:
                own.broadcast(torch.tensor([number, local_rank])).wait()
        else:
            data = torch.full((2,), -1)
            own.broadcast(data).wait()
            got[number, local_rank] = data.tolist()

    everyone = [(number, local) for number, node in enumerate(nodes) for local in range(node.size)]
    together([partial(rank, *place) for place in everyone])
    assert set(got) == {(number, local) for number, local in everyone if local >= nodes[number].learners}
    learning = [number for number, node in enumerate(nodes) if node.learners]
    served = Counter(dict.fromkeys(learning, 0))
    for (number, local), (sender, of_sender) in got.items():
        assert of_sender == 0 and (sender == number or not nodes[number].learners)
        served[sender] += local == nodes[number].learners and not nodes[number].learners
    assert max(served.values()) - min(served.values()) <= 1

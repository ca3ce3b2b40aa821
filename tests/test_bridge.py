"""What the first learner sends reaches every generator to the bit, and each node once, whatever the ranks and nodes are."""

import os
import random
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from helpers import ROOT
from torch.distributed import HashStore, TCPStore

from rl import bridge
from rl.bridge import Bridge, Slots

LAYOUTS = [  # the node of the first learner, then of each generator
    [0, 0],
    [0, 1],
    [0, 0, 0, 0],
    [0, 1, 1, 1],
    [0, 0, 1, 1, 2],
    [3, 0, 0, 3, 3, 7],
    [-1, 0, 0, 1, 1],
]
KINDS = [torch.float32, torch.bfloat16, torch.long, torch.uint8]


@pytest.fixture
def small_slots(monkeypatch):
    monkeypatch.setattr(bridge, "SLOT_BYTES", 1 << 14)


def messages(seed: int) -> list[torch.Tensor]:
    """Of all lengths, from none to several slots, of any bits."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [0, 1, *(rng.randrange(1, 3 * bridge.SLOT_BYTES // 8) * 8 for _ in range(10)), bridge.SLOT_BYTES]
    kinds = [rng.choice(KINDS) for _ in sizes]
    sizes = [size // kind.itemsize * kind.itemsize for size, kind in zip(sizes, kinds, strict=True)]
    drawn = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    return [data.view(kind) for data, kind in zip(drawn, kinds, strict=True)]


def together(acts: list) -> None:
    """Runs each in a thread, and raises what one of them has raised."""
    errors = []

    def run(act) -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("node_of", LAYOUTS)
def test_every_message_arrives_to_the_bit(node_of, small_slots):
    store, sent = HashStore(), messages(seed=len(node_of))
    bridges, got = [None] * len(node_of), [[] for _ in node_of]

    def rank(place: int) -> None:
        rng = random.Random(place)
        own = bridges[place] = Bridge.over_host(store, place, node_of, timedelta(seconds=60))
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

    together([lambda place=place: rank(place) for place in range(len(node_of))])
    for received in got:
        assert all(
            torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in zip(received, sent, strict=True)
        )
    on_network = [place for place, own in enumerate(bridges) if own.group]
    nodes = list(dict.fromkeys(node_of))
    assert on_network == ([node_of.index(node) for node in nodes] if len(nodes) > 1 else []), "one rank of each node"


@pytest.mark.timeout(90)
@pytest.mark.parametrize("killed", ["the first", "a neighbour"])
def test_a_process_that_dies_is_noticed(killed, small_slots):
    """By those who wait for it; they need no timeout."""
    store = TCPStore("localhost", 0, None, True, wait_for_workers=False)
    number = 0 if killed == "a neighbour" else 1
    pid = os.fork()
    if not pid:
        Slots(TCPStore("localhost", store.port), 1 - number, 2, timedelta(seconds=60))
        time.sleep(60)
        os._exit(0)
    own = Slots(TCPStore("localhost", store.port), number, 2, timedelta(seconds=60))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    data = torch.zeros(5 * bridge.SLOT_BYTES, dtype=torch.uint8)
    with pytest.raises(ConnectionError, match=f"process {pid}"):
        own.lay_open(data) if own.is_first else own.take(data)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_node_of_three_generators_receives_the_weights_once(demo_model, network):
    versions = 4
    job = network(2).start(
        [(n, [ROOT / "tests/programs/receive_bytes.py", demo_model, versions, g]) for n, g in [(1, 0), (3, 3)]]
    )
    (code, first), (_, second) = job.wait(100)
    assert code == 0, first + second
    came, size = map(int, re.search(r"(\d+) bytes came for (\d+)", second).groups())
    assert versions * size < came < 1.1 * versions * size

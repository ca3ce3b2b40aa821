"""Records between two nodes: each arrives once, in order and whole; a broken connection is an error on both sides; strangers
take no memory."""

import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest
from test_ring import LIMIT, kill, start
from torch.distributed import HashStore, TCPStore

from rl.ranks.stops import lost_connection
from rl.transport.relay import Forwarder, Receiver
from rl.transport.ring import Ring, RingTimeout

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def store():
    return HashStore()


def address_of(port: int) -> tuple[str, int]:
    """gloo listens on the address of the machine's name."""
    return socket.gethostbyname(socket.gethostname()), port


def drain(ring: Ring, count: int) -> list[bytes]:
    out = [ring.get(timeout=60) for _ in range(count)]
    with pytest.raises(RingTimeout):
        ring.get(timeout=0.2)
    return out


def test_several_nodes_send_into_one_small_ring_and_nothing_is_lost_doubled_or_out_of_order(store):
    target, rings, rng = Ring.create(64 << 10), [Ring.create(1 << 20) for _ in range(3)], random.Random(0)
    receiver = Receiver(target, store, [1, 2, 3])
    forwarders = [Forwarder(ring, store, node) for node, ring in enumerate(rings, 1)]
    sent = [[b"%d/%d/" % (node, i) + rng.randbytes(rng.randrange(4000)) for i in range(200)] for node in range(3)]
    for i in range(200):
        for ring, of_node in zip(rings, sent, strict=True):
            ring.put(of_node[i])
    ends = [threading.Thread(target=forwarder.finish) for forwarder in forwarders]
    for end in ends:
        end.start()
    arrived = drain(target, 600)
    for node, of_node in enumerate(sent):
        assert [record for record in arrived if record.startswith(b"%d/" % node)] == of_node
    for end in ends:
        end.join(60)
    receiver.check()


@pytest.mark.parametrize("size", [1, 16, (1 << 20) - 1, 1 << 20, (7 << 20) + 5])
def test_a_record_of_any_size_arrives_whole(store, size):
    target, ring = Ring.create(32 << 20), Ring.create(32 << 20)
    record = os.urandom(size)
    receiver, forwarder = Receiver(target, store, [1]), Forwarder(ring, store, 1)
    for sent in (record, b"next"):
        ring.put(sent)
    forwarder.finish()
    assert drain(target, 2) == [record, b"next"], "they are there when `finish` returns"
    receiver.check()


@pytest.mark.slow
def test_a_full_ring_holds_the_sender_back(store):
    """What is on its way is bounded by the two rings and the buffers of the connection."""
    target, ring = Ring.create(32 << 10), Ring.create(64 << 10)
    receiver, forwarder = Receiver(target, store, [1]), Forwarder(ring, store, 1)
    taken = 0
    with pytest.raises(RingTimeout):
        while taken < 100_000:
            ring.put(bytes(4000), timeout=2.0)
            taken += 1
    threading.Thread(target=forwarder.finish).start()
    assert len(drain(target, taken)) == taken
    receiver.check()


@pytest.mark.parametrize("killed", [Forwarder, Receiver])
def test_a_connection_that_breaks_is_the_loss_of_a_rank(killed):
    """The end that is left notices, without a timeout."""
    store = TCPStore("localhost", 0, None, True, wait_for_workers=False)

    def make(kind: type) -> tuple[Ring, Receiver | Forwarder]:
        ring, own = Ring.create(1 << 20), TCPStore("localhost", store.port)
        return ring, kind(ring, own, [1] if kind is Receiver else 1)

    def other() -> None:
        ring, _ = make(killed)
        for _ in range(2):
            ring.put(b"a record") if killed is Forwarder else ring.get(timeout=60)
        TCPStore("localhost", store.port).set("connected", "")
        time.sleep(LIMIT)

    pid = start(other)
    ring, end = make(Receiver if killed is Forwarder else Forwarder)
    for _ in range(2):
        ring.put(b"a record") if killed is Receiver else ring.get(timeout=60)
    store.get("connected")
    kill(pid)
    with pytest.raises(RuntimeError) as error:
        for _ in range(600):
            if killed is Receiver:
                with contextlib.suppress(RingTimeout):
                    ring.put(bytes(4000), timeout=0)
            end.check()
            time.sleep(0.1)
    assert lost_connection(error.value), error.value


# ------------------------------------------------------------------------------------------------------------ strangers


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ports() -> set[int]:
    """Where this process listens."""
    own = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


SPOKEN = {
    "zeros": bytes(1 << 20),
    "HTTP": b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" * 9999,
    "ones": b"\xff" * (1 << 20),
}


@pytest.mark.parametrize("how", SPOKEN)
def test_a_stranger_takes_no_memory_however_it_speaks(store, how):
    """Several speak at once, wherever the connection listens, while records arrive."""
    ring, target, before = Ring.create(1 << 20), Ring.create(1 << 20), ports()
    receiver, forwarder = Receiver(target, store, [1]), Forwarder(ring, store, 1)
    ring.put(b"the first")
    assert target.get(timeout=60) == b"the first"
    opened = ports() - before
    assert opened
    held = resident()
    with contextlib.ExitStack() as stack:
        for port in [*opened] * 4:
            stranger = stack.enter_context(socket.create_connection(address_of(port), timeout=0.3))
            with contextlib.suppress(OSError):
                for _ in range(64):
                    stranger.sendall(SPOKEN[how])
        for i in range(100):
            ring.put(b"%d" % i)
        assert drain(target, 100) == [b"%d" % i for i in range(100)]
    assert resident() - held < 16 << 20
    forwarder.finish()
    receiver.check()

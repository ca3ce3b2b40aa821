"""Records between two nodes: each arrives once, in order and whole; a broken connection is an error on both sides; strangers
take no memory."""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from rl.errors import RankLost, UserError
from rl.ranks.stops import lost_connection
from rl.transport import relay
from rl.transport.relay import Forwarder, Receiver
from rl.transport.ring import Ring, RingTimeout

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return HashStore()


def drain(ring: Ring, count: int) -> list[bytes]:
    out = [ring.get(timeout=60) for _ in range(count)]
    with pytest.raises(RingTimeout):
        ring.get(timeout=0.2)
    return out


def port_of(store: HashStore) -> int:
    return int(store.get("relay/1").rpartition(b":")[2])


def until_raised(end: Receiver | Forwarder) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        end.check()
        time.sleep(0.01)


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


@pytest.mark.parametrize("size", [0, 1, relay.HEAD.size, relay.SECRET, (1 << 20) - 1, 1 << 20, (7 << 20) + 5])
def test_a_record_of_any_size_arrives_whole(store, size):
    target, ring = Ring.create(32 << 20), Ring.create(32 << 20)
    record = os.urandom(size)
    receiver, forwarder = Receiver(target, store, [1]), Forwarder(ring, store, 1)
    for sent in (record, b"next"):
        ring.put(sent)
    forwarder.finish()
    assert drain(target, 2) == [record, b"next"], "they are there when `finish` returns"
    receiver.check()


def test_a_receiver_that_cannot_be_reached_is_named(store):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        closed = f"127.0.0.1:{nobody.getsockname()[1]}"
        store.set("relay/1", closed)
        with pytest.raises(UserError, match=f"^{closed}, where this node's samples go, cannot be reached from here"):
            Forwarder(Ring.create(1 << 16), store, 1)


@pytest.mark.slow
def test_a_full_ring_holds_the_sender_back(store, monkeypatch):
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


@pytest.mark.parametrize("amid", [True, False])
def test_a_connection_that_breaks_is_the_loss_of_a_rank(store, amid):
    """The receiver's end notices a sender that dies within a record; the sender's end notices a receiver that is gone."""
    target, ring = Ring.create(1 << 20), Ring.create(1 << 20)
    if amid:
        receiver = Receiver(target, store, [1])
        with socket.create_connection(("127.0.0.1", port_of(store))) as sender:
            sender.sendall(bytes(store.get("relay/job")) + relay.HEAD.pack(100, 0) + bytes(10))
        end = receiver
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            store.set("relay/1", f"127.0.0.1:{listener.getsockname()[1]}")
            end = Forwarder(ring, store, 1)
            listener.accept()[0].close()
        for _ in range(200):
            ring.put(bytes(4000), timeout=10)
            time.sleep(1e-3)
            if end._moving.done():
                break
    with pytest.raises(RankLost, match="connection lost to") as error:
        until_raised(end)
    assert lost_connection(error.value)


def test_a_record_that_changes_on_its_way_is_refused(store):
    receiver = Receiver(Ring.create(1 << 20), store, [1])
    with socket.create_connection(("127.0.0.1", port_of(store))) as sender:
        sender.sendall(bytes(store.get("relay/job")) + relay.HEAD.pack(4, 1) + b"four")
        with pytest.raises(RuntimeError, match="does not fit its checksum"):
            until_raised(receiver)


# ------------------------------------------------------------------------------------------------------------ strangers


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pour(stranger: socket.socket, head: bytes, again: bytes = bytes(1 << 20), most: int = 64 << 20) -> int:
    """Send the head, and then the same bytes again and again. Return how many were sent until the other end hung up."""
    sent = 0
    stranger.settimeout(5)
    with contextlib.suppress(OSError):
        stranger.sendall(head)
        while sent < most:
            stranger.sendall(again)
            sent += len(again)
    return sent


SPOKEN = {
    "zeros": (b"", bytes(1 << 20)),
    "HTTP": (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"X-Header: 1\r\n" * 9999),
    "a wrong secret and a huge record": (b"0" * relay.SECRET + relay.HEAD.pack(1 << 40, 0), bytes(1 << 20)),
    "one byte": (b"x", struct.pack("<Q", 1 << 40)),
}


@pytest.mark.parametrize("how", SPOKEN)
def test_a_stranger_takes_no_memory_however_it_speaks(store, how):
    """Several speak at once before and while a forwarder connects. Afterwards the port is closed."""
    ring, target = Ring.create(1 << 20), Ring.create(1 << 20)
    receiver, port = Receiver(target, store, [1]), port_of(store)
    before = resident()
    sent: list[int] = []
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(4)]
        threads = [threading.Thread(target=lambda s=s: sent.append(pour(s, *SPOKEN[how]))) for s in strangers]
        for thread in threads:
            thread.start()
        forwarder = Forwarder(ring, store, 1)
        for i in range(100):
            ring.put(b"%d" % i)
        assert drain(target, 100) == [b"%d" % i for i in range(100)]
        for thread in threads:
            thread.join()
    assert max(sent) < 64 << 20, "the receiver read it"
    assert resident() - before < 8 << 20
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    forwarder.finish()
    receiver.check()


@pytest.mark.slow
def test_strangers_who_say_nothing_are_few_and_keep_no_one_out(store):
    """The oldest makes way for the newest; all are let go when the nodes have connected."""
    ring, target = Ring.create(1 << 20), Ring.create(1 << 20)
    receiver = Receiver(target, store, [1])
    before, files = resident(), len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        address = "127.0.0.1", port_of(store)
        strangers = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(400)]
        forwarder = Forwarder(ring, store, 1)
        ring.put(b"a record")
        assert drain(target, 1) == [b"a record"]
        assert len(os.listdir("/proc/self/fd")) < files + 400 + relay.STRANGERS + 20
        assert resident() - before < 8 << 20
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b"", "it is let go"
    forwarder.finish()
    receiver.check()


def test_another_job_is_a_stranger(store):
    """Its forwarder may have been given the same address."""
    target, ring, other, foreign = Ring.create(1 << 20), Ring.create(1 << 20), HashStore(), Ring.create(1 << 20)
    receiver = Receiver(target, store, [1])
    other.set("relay/1", store.get("relay/1"))
    stranger = Forwarder(foreign, other, 1)
    foreign.put(b"of another job")
    forwarder = Forwarder(ring, store, 1)
    ring.put(b"of this one")
    forwarder.finish()
    assert drain(target, 1) == [b"of this one"]
    with pytest.raises(RankLost):
        stranger.finish()
    receiver.check()

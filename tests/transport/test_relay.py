"""Records between two nodes: each arrives once, in order and whole, whatever happens to the connection."""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import zmq
from torch.distributed import HashStore

from rl.errors import UserError
from rl.transport import relay
from rl.transport.relay import Forwarder, Receiver
from rl.transport.ring import Ring, RingTimeout

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return HashStore()


def drain(ring: Ring, count: int, slowly: float = 0.0) -> list[bytes]:
    out = []
    while len(out) < count:
        out.append(ring.get(timeout=60))
        time.sleep(slowly)
    with pytest.raises(RingTimeout):
        ring.get(timeout=0.2)
    return out


def records(sender: int, count: int, largest: int) -> list[bytes]:
    rng = random.Random(sender)
    return [f"{sender}/{i}/".encode() + rng.randbytes(rng.randrange(largest)) for i in range(count)]


class Wire:
    """A TCP connection through this process. It breaks in mid-stream and loses its buffers: `cuts` times, each after about
    `cut_after` bytes."""

    def __init__(self, address: str, cut_after: int, cuts: int):
        self.cut_after, self.cuts = cut_after, cuts
        self.target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.carried = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(self.target)
            self.pairs.append((client, server))
            for a, b in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(1 << 16):
                self.carried += len(data)
                b.sendall(data)
                if self.cuts and self.carried > self.cut_after:
                    self.carried, self.cuts = 0, self.cuts - 1
                    self.cut()
        except OSError:
            pass

    def cut(self) -> None:
        for pair in self.pairs:
            for end in pair:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset: nothing more is delivered
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RD)  # a thread that reads from it would keep it open
                end.close()
        self.pairs.clear()


def test_several_nodes_send_into_one_small_ring_and_nothing_is_lost_doubled_or_out_of_order(store):
    target, rings = Ring.create(64 << 10), [Ring.create(1 << 20) for _ in range(3)]
    receiver = Receiver(target, store, [1, 2, 3])
    forwarders = [Forwarder(ring, store, node) for node, ring in enumerate(rings, 1)]
    sent = [records(node, 200, 4000) for node in range(3)]
    for i in range(200):
        for ring, of_node in zip(rings, sent, strict=True):
            ring.put(of_node[i])
    arrived = drain(target, 600)
    for node, of_node in enumerate(sent):
        assert [record for record in arrived if record.startswith(b"%d/" % node)] == of_node
    for forwarder in forwarders:
        forwarder.wait(200)
        forwarder.close()
    receiver.close()


def test_a_connection_that_is_cut_again_and_again_loses_and_doubles_nothing(store):
    target, ring = Ring.create(1 << 20), Ring.create(8 << 20)
    receiver = Receiver(target, store, [1])
    wire = Wire(store.get("relay/1").decode(), cut_after=500_000, cuts=6)
    store.set("relay/1", wire.address)
    forwarder, sent = Forwarder(ring, store, 1), records(0, 400, 30_000)
    writer = threading.Thread(target=lambda: [ring.put(record) for record in sent])
    writer.start()
    assert drain(target, 400) == sent
    writer.join()
    forwarder.wait(400)
    assert not wire.cuts
    forwarder.close()
    receiver.close()


def test_a_node_that_knows_itself_by_a_loopback_address_is_reached_by_its_name(store, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    ring = Ring.create(1 << 20)
    receiver, forwarder = Receiver(Ring.create(1 << 20), store, [1]), Forwarder(ring, store, 1)
    assert store.get("relay/1").startswith(b"tcp://localhost:")
    ring.put(b"a record")
    forwarder.wait(1)
    for end in (forwarder, receiver):
        end.close()


def test_a_receiver_that_cannot_be_reached_is_named(store, monkeypatch, capfd):
    monkeypatch.setattr(relay, "SILENT_SECONDS", 1)
    with closing(Receiver(Ring.create(1 << 16), store, [1])), socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        closed = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        store.set("relay/1", closed)
        with closing(Forwarder(Ring.create(1 << 16), store, 1)):
            said, deadline = "", time.monotonic() + 60
            while closed not in said and time.monotonic() < deadline:
                time.sleep(0.05)
                said += capfd.readouterr().err
    assert said.count(f"warning: {closed}, where this node's samples go, has not answered") == 1


def test_a_full_ring_holds_the_sender_back(store, monkeypatch):
    monkeypatch.setattr(relay, "UNDER_WAY", 20_000)
    target, ring = Ring.create(32 << 10), Ring.create(64 << 10)
    receiver, forwarder = Receiver(target, store, [1]), Forwarder(ring, store, 1)
    taken = 0
    with pytest.raises(RingTimeout):
        while True:
            ring.put(bytes(4000), timeout=2.0)
            taken += 1
    assert taken * 4000 < (32 << 10) + (64 << 10) + 2 * 20_000  # what the rings hold, and what may be under way
    assert len(drain(target, taken)) == taken
    for end in (forwarder, receiver):
        end.close()


def test_a_record_that_is_too_large_for_the_receivers_ring_is_an_error_there(store):
    ring = Ring.create(1 << 20)
    receiver, forwarder = Receiver(Ring.create(64 << 10), store, [1]), Forwarder(ring, store, 1)
    ring.put(bytes(100_000))
    deadline = time.monotonic() + 60
    with pytest.raises(UserError, match=r"a record of 100,000 bytes does not fit.*Raise --ring-mb"):
        while time.monotonic() < deadline:
            receiver.check()
            time.sleep(0.01)
    forwarder.close()


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


ZMTP = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)  # ZeroMQ's greeting
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
FRAME = bytes([3]) + struct.pack(">Q", 1 << 20) + bytes(1 << 20)  # of a message that has more of them
SPOKEN = {
    "zeros": (b"", bytes(1 << 20)),
    "an unfinished message of ZeroMQ": (ZMTP + bytes([4, len(READY)]) + READY, FRAME),
    "a huge frame of ZeroMQ": (ZMTP + bytes([6]) + struct.pack(">Q", 1 << 40), bytes(1 << 20)),
    "HTTP": (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"X-Header: 1\r\n" * 9999),
    "TLS": (bytes([22, 3, 1, 255, 255]), bytes(1 << 20)),
    "a wrong hello and a huge record": (os.urandom(relay.HELLO.size) + relay.HEAD.pack(0, 1 << 40, 0), bytes(1 << 20)),
}


@pytest.mark.parametrize("how", SPOKEN)
def test_a_stranger_takes_no_memory_however_it_speaks(store, how):
    """Several speak at once while a forwarder sends."""
    ring, target = Ring.create(1 << 20), Ring.create(1 << 20)
    with closing(Receiver(target, store, [1])) as receiver, closing(Forwarder(ring, store, 1)) as forwarder:
        port = int(store.get("relay/1").rpartition(b":")[2])
        before = resident()
        sent: list[int] = []
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(4)]
            threads = [threading.Thread(target=lambda s=s: sent.append(pour(s, *SPOKEN[how]))) for s in strangers]
            for thread in threads:
                thread.start()
            for i in range(100):
                ring.put(b"%d" % i)
            assert drain(target, 100) == [b"%d" % i for i in range(100)]
            for thread in threads:
                thread.join()
        assert max(sent) < 64 << 20, "the receiver read it"
        assert resident() - before < 8 << 20
        forwarder.wait(100)
        receiver.check()


def test_strangers_who_say_nothing_are_few_and_keep_no_one_out(store, monkeypatch):
    """The oldest makes way for the newest; who says nothing is let go in the end."""
    monkeypatch.setattr(relay, "HELLO_SECONDS", 0.5)
    monkeypatch.setattr(relay, "SILENT_SECONDS", 2)
    ring, target = Ring.create(1 << 20), Ring.create(1 << 20)
    with closing(Receiver(target, store, [1])) as receiver, contextlib.ExitStack() as stack:
        port = int(store.get("relay/1").rpartition(b":")[2])
        before, files = resident(), len(os.listdir("/proc/self/fd"))
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(400)]
        with closing(Forwarder(ring, store, 1)) as forwarder:
            for i in range(20):
                ring.put(b"%d" % i)
            forwarder.wait(20)
            assert len(os.listdir("/proc/self/fd")) < files + 400 + relay.STRANGERS + 20
            assert resident() - before < 8 << 20
            for stranger in strangers:
                with contextlib.suppress(ConnectionError):
                    while stranger.recv(64):  # until it is let go
                        pass
        receiver.check()


def test_what_does_not_come_from_the_job_is_left_out(store):
    """It may come from a port scanner, or from another job's forwarder that was given the same address."""
    target, ring = Ring.create(1 << 20), Ring.create(1 << 20)
    other = HashStore()
    with closing(Receiver(target, store, [1])), zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        port = int(store.get("relay/1").rpartition(b":")[2])
        with socket.create_connection(("127.0.0.1", port)) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.linger = 0
        stranger.connect(store.get("relay/1").decode())
        for parts in ([b""], [b"hello"], [bytes(relay.HELLO.size), b"a record"], [os.urandom(relay.HELLO.size)] * 3):
            stranger.send_multipart(parts)
        other.set("relay/1", store.get("relay/1"))
        foreign = Ring.create(1 << 20)
        with closing(Forwarder(foreign, other, 1)), closing(Forwarder(ring, store, 1)) as forwarder:
            foreign.put(b"of another job")
            for i in range(100):
                ring.put(b"of this one, %d" % i)
            forwarder.wait(100)
            assert drain(target, 100) == [b"of this one, %d" % i for i in range(100)]


@pytest.mark.parametrize("size", [0, 1, relay.HEAD.size, relay.HELLO.size, (1 << 20) - 1, 1 << 20, (7 << 20) + 5])
def test_a_record_of_any_size_arrives_whole(store, size):
    target, ring = Ring.create(32 << 20), Ring.create(32 << 20)
    record = os.urandom(size) or b"x"
    with closing(Receiver(target, store, [1])), closing(Forwarder(ring, store, 1)) as forwarder:
        for sent in (record, b"next"):
            ring.put(sent)
        forwarder.wait(2)
        assert drain(target, 2) == [record, b"next"]

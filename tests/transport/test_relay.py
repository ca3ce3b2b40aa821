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
    receiver.context.destroy(0)


GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)  # ZMTP 3.0, as a client
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.mark.parametrize("announced", [2 << 30, 1 << 40, 64 << 20])
@pytest.mark.parametrize("command", [True, False], ids=["as a command", "as a message"])
def test_a_frame_that_is_too_long_is_refused_before_it_is_read(store, command, announced):
    with closing(Receiver(Ring.create(32 << 20), store, [1])) as receiver:
        port = int(store.get("relay/1").rpartition(b":")[2])
        before, sent = resident(), 0
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.sendall(GREETING)
            if not command:
                stranger.sendall(bytes([4, len(READY)]) + READY)
            stranger.recv(64)
            stranger.sendall(bytes([6 if command else 2]) + struct.pack(">Q", announced))
            with contextlib.suppress(ConnectionError, TimeoutError):
                while sent < 64 << 20:
                    stranger.sendall(bytes(1 << 20))
                    sent += 1 << 20
        assert sent < 64 << 20, "the receiver read the frame"
        assert resident() - before < 32 << 20
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
        for parts in ([b""], [b"hello"], [bytes(relay.HEAD.size), b"a record"], [os.urandom(relay.HEAD.size)] * 3):
            stranger.send_multipart(parts)
        other.set("relay/1", store.get("relay/1"))
        foreign = Ring.create(1 << 20)
        with closing(Forwarder(foreign, other, 1)), closing(Forwarder(ring, store, 1)) as forwarder:
            foreign.put(b"of another job")
            for i in range(100):
                ring.put(b"of this one, %d" % i)
            forwarder.wait(100)
            assert drain(target, 100) == [b"of this one, %d" % i for i in range(100)]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("size", [0, 1, relay.FRAME - 1, relay.FRAME, relay.FRAME + 1, 3 * relay.FRAME, 7 * relay.FRAME + 5])
def test_a_record_of_any_size_arrives_whole(store, size):
    target, ring = Ring.create(32 << 20), Ring.create(32 << 20)
    record = os.urandom(size) or b"x"
    with closing(Receiver(target, store, [1])), closing(Forwarder(ring, store, 1)) as forwarder:
        for sent in (record, b"next"):
            ring.put(sent)
        forwarder.wait(2)
        assert drain(target, 2) == [record, b"next"]

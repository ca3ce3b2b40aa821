"""Samples between nodes: the records of a ring whose node has no learner travel over ZeroMQ into the ring of one that has.

    node that only generates                                node with learners
    generators -> ring -> Forwarder (a thread)  == TCP ==>  Receiver (a thread) -> ring -> the learners' inbox

What a generator sends is delivered once and in order, or the run stops. A record stays with the forwarder until the receiver
has put it into its ring and said so. After a broken connection, which ZeroMQ mends, all that was not acknowledged is sent
again; what had come already is left out by its number. Nothing is taken from a ring while the one behind it is full: so back
pressure reaches the generators.

Records travel in frames of 1 MiB at most, and a longer frame is refused before it is read.

Nothing is encrypted, as with torch.distributed: the network between the nodes must be one that the job can trust. Each record
bears a number that the job's ranks know from torchrun's store. What comes without it is not the job's, and is left out.
"""

import math
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import deque

import xxhash
import zmq
from torch.distributed import Store
from zmq.utils import monitor

from rl.background import in_background
from rl.errors import UserError
from rl.ranks import watchdog
from rl.transport.ring import RecordTooLarge, Ring, RingTimeout

HEAD = struct.Struct("<16s16sQQ")  # the job's number, a forwarder's own name, the record's number, its checksum
UNDER_WAY = 64 << 20  # bytes that were sent and are not acknowledged yet
FRAME = 1 << 20  # bytes of a record that go into one frame
SILENT_SECONDS = 20  # after which a connection without a sign of life is taken for broken, and made again


def _own_address() -> str:
    """This machine's address on the network over which the job's first node is reached; nothing is sent. The first node's own
    is its name, if it knows itself by a loopback address (many an /etc/hosts says so): others resolve it."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address = probe.getsockname()[0]
    return host if address.startswith("127.") else address


def _number_of_job(store: Store) -> bytes:
    """The first to ask makes it up."""
    return bytes(store.compare_set("relay/job", "", secrets.token_hex(8)))


def _socket(context: zmq.Context, kind: int) -> zmq.Socket:
    end = context.socket(kind)
    end.linger = 0
    end.maxmsgsize = FRAME  # ZeroMQ drops who announces more
    end.sndhwm = end.rcvhwm = 0  # the window bounds what is under way
    end.heartbeat_ivl, end.heartbeat_timeout = 1000 * SILENT_SECONDS // 4, 1000 * SILENT_SECONDS
    return end


class _Thread:
    """Moves records until it is closed. What goes wrong in it is raised in the main thread, by `check`."""

    def __init__(self, name: str):
        self._closed = threading.Event()
        self._moving = in_background(self._move, name)

    def check(self) -> None:
        if self._moving.done():
            self._moving.result()

    def close(self) -> None:
        self._closed.set()
        self._moving.result()


class Receiver(_Thread):
    """The learners' end: puts what comes from the nodes `senders` into its ring."""

    def __init__(self, ring: Ring, store: Store, senders: list[int]):
        self.ring = Ring.attach(ring.address)  # a ring object is one thread's end
        self.taken: dict[bytes, int] = {}  # forwarder -> records of it that are in the ring
        self._job = _number_of_job(store)
        self.context = zmq.Context()
        self.socket = _socket(self.context, zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://*")
        super().__init__("receiver")
        for sender in senders:
            store.set(f"relay/{sender}", f"tcp://{_own_address()}:{port}")

    def _move(self) -> None:
        while not self._closed.is_set():
            if not self.socket.poll(100):
                continue
            sender, *frames = self.socket.recv_multipart()
            if not frames or len(frames[0]) != HEAD.size or not frames[0].startswith(self._job):
                continue
            head, *frames = frames
            record = b"".join(frames)
            _, name, number, checksum = HEAD.unpack(head)
            if xxhash.xxh3_64_intdigest(record) != checksum:
                raise RuntimeError("a record from another node does not fit its checksum")
            taken = self.taken.setdefault(name, 0)
            if number == taken and self._put(record):
                self.taken[name] = taken + 1
            self.socket.send_multipart([sender, struct.pack("<Q", self.taken[name])])
        self.context.destroy(0)

    def _put(self, record: bytes) -> bool:
        """Waits for room; False if it is closed before there is some."""
        while not self._closed.is_set():
            try:
                self.ring.put(record, timeout=0.5)
                return True
            except RingTimeout:
                pass
            except RecordTooLarge as error:
                what = f"a group from another node does not fit into the ring here: {error} bytes"
                raise UserError(f"{what}. Raise --ring-mb to what the nodes that generate have.") from None
        return False


class Forwarder(_Thread):
    """The generators' end: takes what is in the ring of this node, and sends it to its receiver."""

    def __init__(self, ring: Ring, store: Store, node: int):
        self.ring = Ring.attach(ring.address)
        self.bytes = 0  # sent, without what was sent again
        self.acknowledged = 0  # records
        self._name, self._count = secrets.token_bytes(16), 0  # records that were taken out of the ring
        self._under_way: deque[list[bytes]] = deque()
        self._job = _number_of_job(store)
        self.context = zmq.Context()
        self.socket = _socket(self.context, zmq.DEALER)
        self._events = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        with watchdog.doing("a node with learners to listen for samples"):
            self._address = store.get(f"relay/{node}").decode()
        self.socket.connect(self._address)
        watchdog.show("records sent to another node", lambda: f"{self._count}, {self.acknowledged} of them have arrived")
        super().__init__("forwarder")

    def wait(self, records: int) -> None:
        """Returns when this many records, in all, have arrived."""
        while self.acknowledged < records:
            self.check()
            time.sleep(1e-2)

    def _move(self) -> None:
        connections, patience = 0, time.monotonic() + SILENT_SECONDS
        while not self._closed.is_set():
            connections += self._connected()
            if not connections and time.monotonic() > patience:
                patience = math.inf
                what = f"{self._address}, where this node's samples go, has not answered for {SILENT_SECONDS} s"
                print(f"warning: {what}: is it closed to this node?", file=sys.stderr, flush=True)
            if connections > 1:  # again: what was under way may be lost
                connections = 1
                for head, record in self._under_way:
                    self._send(head, record)
            while self.socket.poll(0 if self._has_room() else 50):
                self._acknowledge(*struct.unpack("<Q", self.socket.recv()))
            if self._has_room():
                self._take()
        self.context.destroy(0)

    def _connected(self) -> int:
        """How often the connection has been made since the last call."""
        count = 0
        while self._events.poll(0):
            monitor.recv_monitor_message(self._events)
            count += 1
        return count

    def _has_room(self) -> bool:
        return sum(len(record) for _, record in self._under_way) < UNDER_WAY

    def _take(self) -> None:
        try:
            record = self.ring.get(timeout=0.02)
        except RingTimeout:
            return
        head = HEAD.pack(self._job, self._name, self._count, xxhash.xxh3_64_intdigest(record))
        self._count += 1
        self._under_way.append([head, record])
        self._send(head, record)
        self.bytes += len(record)

    def _send(self, head: bytes, record: bytes) -> None:
        view = memoryview(record)
        self.socket.send_multipart([head, *(view[at : at + FRAME] for at in range(0, len(record), FRAME))])

    def _acknowledge(self, taken: int) -> None:
        """taken: records, from the first on, that are in the receiver's ring."""
        while self._under_way and HEAD.unpack(self._under_way[0][0])[2] < taken:
            self._under_way.popleft()
        self.acknowledged = max(self.acknowledged, taken)
        watchdog.progress()

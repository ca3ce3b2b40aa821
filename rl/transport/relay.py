"""Samples between nodes: the records of a ring on a node without learners are sent over ZeroMQ into the ring of a node with
learners.

    node that only generates                                node with learners
    generators -> ring -> Forwarder (a thread)  == TCP ==>  Receiver (a thread) -> ring -> the learners' inbox

Each record is delivered once and in order, or the run stops. The forwarder keeps a record until the receiver has put it into
its ring and acknowledged it. ZeroMQ restores a broken connection; then the forwarder sends all unacknowledged records again,
and the receiver drops those that it already has, by their numbers. No record is taken from a ring while the next ring is full,
so back pressure reaches the generators.

Records are sent in frames of at most 1 MiB, and a longer frame is refused before it is read.

As with torch.distributed, nothing is encrypted: the job must be able to trust the network between its nodes. Each record
carries a number that the job's ranks know from torchrun's store. The receiver ignores records without it.
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
from concurrent.futures import Future

import xxhash
import zmq
from torch.distributed import Store
from zmq.utils import monitor

from rl.background import in_background
from rl.errors import UserError
from rl.ranks import watchdog
from rl.transport.ring import RecordTooLarge, Ring, RingTimeout

HEAD = struct.Struct("<16s16sQQ")  # the job's number, the forwarder's name, the record's number and checksum
UNDER_WAY = 64 << 20  # most bytes that are sent and not yet acknowledged
FRAME = 1 << 20  # bytes of a record in one frame
SILENT_SECONDS = 20  # without a sign of life until a connection counts as broken and is made again


def _own_address() -> str:
    """Return this machine's address on the network that leads to the job's first node. The first node itself returns its name
    if its /etc/hosts gives it a loopback address: other nodes can resolve the name. Sends nothing."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address = probe.getsockname()[0]
    return host if address.startswith("127.") else address


class _End:
    """One end of the connection, with a thread that moves records until it is closed. `check` raises the thread's errors."""

    def __init__(self, ring: Ring, store: Store, kind: int):
        self.ring = Ring.attach(ring.address)  # a Ring object is for one thread
        self._job = bytes(store.compare_set("relay/job", "", secrets.token_hex(8)))  # the number of the first end
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        self.socket.maxmsgsize = FRAME  # ZeroMQ drops a sender that announces more
        self.socket.sndhwm = self.socket.rcvhwm = 0  # UNDER_WAY is the limit
        self.socket.heartbeat_ivl = 1000 * SILENT_SECONDS // 4
        self.socket.heartbeat_timeout = 1000 * SILENT_SECONDS
        self._closed = threading.Event()
        self._moving: Future | None = None

    def check(self) -> None:
        if self._moving.done():
            self._moving.result()

    def close(self) -> None:
        self._closed.set()
        self._moving.result()


class Receiver(_End):
    """The learners' end: puts the records of the nodes `senders` into its ring."""

    def __init__(self, ring: Ring, store: Store, senders: list[int]):
        super().__init__(ring, store, zmq.ROUTER)
        self._taken: dict[bytes, int] = {}  # forwarder -> number of its records put into the ring
        port = self.socket.bind_to_random_port("tcp://*")
        self._moving = in_background(self._move, "receiver")
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
            taken = self._taken.setdefault(name, 0)
            if number == taken and self._put(record):
                self._taken[name] = taken + 1
            self.socket.send_multipart([sender, struct.pack("<Q", self._taken[name])])
        self.context.destroy(0)

    def _put(self, record: bytes) -> bool:
        """Wait for room. Return False if this end is closed before there is any."""
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


class Forwarder(_End):
    """The generators' end: takes the records out of the ring of this node and sends them to its receiver."""

    def __init__(self, ring: Ring, store: Store, node: int):
        super().__init__(ring, store, zmq.DEALER)
        self._acknowledged = 0  # records
        self._name = secrets.token_bytes(16)
        self._count = 0  # records taken out of the ring
        self._under_way: deque[list[bytes]] = deque()
        self._events = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        with watchdog.doing("a node with learners to listen for samples"):
            self._address = store.get(f"relay/{node}").decode()
        self.socket.connect(self._address)
        watchdog.show("records sent to another node", lambda: f"{self._count}, {self._acknowledged} of them have arrived")
        self._moving = in_background(self._move, "forwarder")

    def wait(self, records: int) -> None:
        """Return when this many records have arrived in total."""
        while self._acknowledged < records:
            self.check()
            time.sleep(1e-2)

    def _move(self) -> None:
        connections = 0
        patience = time.monotonic() + SILENT_SECONDS
        while not self._closed.is_set():
            connections += self._connected()
            if not connections and time.monotonic() > patience:
                patience = math.inf
                what = f"{self._address}, where this node's samples go, has not answered for {SILENT_SECONDS} s"
                print(f"warning: {what}: is it closed to this node?", file=sys.stderr, flush=True)
            if connections > 1:  # the connection was made again, so records under way may be lost
                connections = 1
                for head, record in self._under_way:
                    self._send(head, record)
            while self.socket.poll(0 if self._has_room() else 50):
                self._acknowledge(*struct.unpack("<Q", self.socket.recv()))
            if self._has_room():
                self._take()
        self.context.destroy(0)

    def _connected(self) -> int:
        """Return how often the connection was made since the last call."""
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

    def _send(self, head: bytes, record: bytes) -> None:
        view = memoryview(record)
        self.socket.send_multipart([head, *(view[at : at + FRAME] for at in range(0, len(record), FRAME))])

    def _acknowledge(self, taken: int) -> None:
        """Forget the records that have arrived. taken: number of records that the receiver has put into its ring so far."""
        while self._under_way and HEAD.unpack(self._under_way[0][0])[2] < taken:
            self._under_way.popleft()
        self._acknowledged = max(self._acknowledged, taken)
        watchdog.progress()

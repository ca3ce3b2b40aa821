"""Samples between nodes: the records of a ring on a node without learners are sent over TCP into the ring of a node with
learners.

    node that only generates                                node with learners
    generators -> ring -> Forwarder (a thread)  == TCP ==>  Receiver (a thread) -> ring -> the learners' inbox

Each record is delivered once and in order, or the run stops. The forwarder keeps a record until the receiver has put it into
its ring and acknowledged it. A broken connection is made again: the receiver says how many records it has, and the forwarder
sends the rest again. No record is taken from a ring while the next ring is full, so back pressure reaches the generators.

A connection begins with a proof that it knows the job's secret, which the job's ranks have from torchrun's store. Nothing else
is read from a stranger, and only the newest STRANGERS of them are kept, so whoever reaches the port cannot fill the learner's
memory. As with torch.distributed, nothing is encrypted: the job must be able to trust the network between its nodes.
"""

import contextlib
import hmac
import math
import os
import secrets
import select
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import xxhash
from torch.distributed import Store

from rl.background import in_background
from rl.errors import UserError
from rl.ranks import watchdog
from rl.transport.ring import RecordTooLarge, Ring, RingTimeout

CHALLENGE = 16  # bytes with which the receiver greets
HELLO = struct.Struct("<16s32s")  # the forwarder's name, and its answer to the challenge
HEAD = struct.Struct("<QQQ")  # a record's number, length and checksum
TAKEN = struct.Struct("<Q")  # the number of a forwarder's records that the receiver has
UNDER_WAY = 64 << 20  # most bytes that are sent and not yet acknowledged
STRANGERS = 64  # connections without a hello that are kept; one more, and the oldest is closed
HELLO_SECONDS = 10
SILENT_SECONDS = 20  # without a sign of life until a connection counts as broken and is made again
RETRY_SECONDS = 0.2


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

    def __init__(self, ring: Ring, store: Store):
        self.ring = Ring.attach(ring.address)  # a Ring object is for one thread
        self._secret = bytes(store.compare_set("relay/job", "", secrets.token_hex(16)))  # that of the first end
        self._closed = threading.Event()
        self._moving: Future | None = None

    def check(self) -> None:
        if self._moving.done():
            self._moving.result()

    def close(self) -> None:
        self._closed.set()
        self._moving.result()

    def _proof(self, challenge: bytes, name: bytes) -> bytes:
        return hmac.digest(self._secret, challenge + name, "sha256")


class _Guest:
    """A connection at the receiver, and the part of its next message that has arrived."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.name: bytes | None = None  # the forwarder's; None for a stranger
        self.head: tuple[int, int, int] | None = None  # of the record that is arriving
        self.since = time.monotonic()
        self.challenge = secrets.token_bytes(CHALLENGE)
        self.expect(HELLO.size)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(self.challenge)

    def expect(self, size: int) -> None:
        self.message = memoryview(bytearray(size))
        self._arrived = 0

    def read(self) -> bool:
        """Return whether the expected message is complete. Raise OSError if there is none to come."""
        with contextlib.suppress(BlockingIOError):
            while self._arrived < len(self.message):
                count = self.socket.recv_into(self.message[self._arrived :])
                if not count:
                    raise ConnectionResetError
                self._arrived += count
        return self._arrived == len(self.message)


class Receiver(_End):
    """The learners' end: puts the records of the nodes `senders` into its ring."""

    def __init__(self, ring: Ring, store: Store, senders: list[int]):
        super().__init__(ring, store)
        self._taken: dict[bytes, int] = {}  # forwarder -> number of its records put into the ring
        self._guests: list[_Guest] = []  # from the oldest to the newest
        self._waiting: list[_Guest] = []  # those whose record is complete, until there is room for it
        self._listener = socket.create_server(("", 0))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._beat = 0.0  # the time of the next sign of life
        self._moving = in_background(self._move, "receiver")
        for sender in senders:
            store.set(f"relay/{sender}", f"tcp://{_own_address()}:{self._listener.getsockname()[1]}")

    def _move(self) -> None:
        with self._listener, self._selector, contextlib.ExitStack() as guests:
            guests.callback(lambda: [guest.socket.close() for guest in self._guests])
            while not self._closed.is_set():
                self._put_waiting()
                for key, _ in self._selector.select(0 if self._waiting else 0.1):
                    if key.data is None:
                        self._accept()
                    elif key.data in self._guests:  # not closed since the selection
                        self._serve(key.data)
                self._give_signs()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has hung up
            guest = _Guest(self._listener.accept()[0])
            self._guests.append(guest)
            self._selector.register(guest.socket, selectors.EVENT_READ, guest)
        strangers = [guest for guest in self._guests if guest.name is None]
        for guest in strangers[: max(0, len(strangers) - STRANGERS)]:
            self._drop(guest)

    def _serve(self, guest: _Guest) -> None:
        with self._closing_broken(guest):
            while guest.read():
                if guest.name is None:
                    self._welcome(guest)
                elif guest.head is None:
                    guest.head = HEAD.unpack(guest.message)
                    guest.expect(guest.head[1])
                else:
                    return self._keep(guest)

    def _welcome(self, guest: _Guest) -> None:
        """Tell a forwarder how many of its records are here. Raise ConnectionRefusedError if it is not of this job."""
        name, answer = HELLO.unpack(guest.message)
        if not hmac.compare_digest(answer, self._proof(guest.challenge, name)):
            raise ConnectionRefusedError
        for other in [other for other in self._guests if other.name == name]:  # it is broken
            self._drop(other)
        guest.name = name
        guest.expect(HEAD.size)
        self._acknowledge(guest)

    def _keep(self, guest: _Guest) -> None:
        """Let the record that has arrived wait for room, and read no other from this forwarder."""
        if xxhash.xxh3_64_intdigest(guest.message) != guest.head[2]:
            raise RuntimeError("a record from another node does not fit its checksum")
        self._selector.unregister(guest.socket)
        self._waiting.append(guest)

    def _put_waiting(self) -> None:
        """Put the records that wait into the ring while it has room, unless it has them already."""
        for guest in [*self._waiting]:
            taken = self._taken.get(guest.name, 0)
            if guest.head[0] == taken:
                try:
                    self.ring.put(guest.message, timeout=0.05)
                except RingTimeout:
                    return
                except RecordTooLarge as error:
                    what = f"a group from another node does not fit into the ring here: {error} bytes"
                    raise UserError(f"{what}. Raise --ring-mb to what the nodes that generate have.") from None
                self._taken[guest.name] = taken + 1
            self._waiting.remove(guest)
            self._selector.register(guest.socket, selectors.EVENT_READ, guest)
            guest.head = None
            guest.expect(HEAD.size)
            with self._closing_broken(guest):
                self._acknowledge(guest)

    def _acknowledge(self, guest: _Guest) -> None:
        if guest.socket.send(TAKEN.pack(self._taken.get(guest.name, 0))) < TAKEN.size:
            raise BlockingIOError("it does not read")

    def _give_signs(self) -> None:
        """Let the forwarders know now and then that this end is alive, and close the connections of strangers in time."""
        if (now := time.monotonic()) < self._beat:
            return
        self._beat = now + SILENT_SECONDS / 8
        for guest in [*self._guests]:
            with self._closing_broken(guest):
                if guest.name is not None:
                    self._acknowledge(guest)
                elif now > guest.since + HELLO_SECONDS:
                    raise TimeoutError

    @contextlib.contextmanager
    def _closing_broken(self, guest: _Guest) -> Iterator[None]:
        """Close the connection on an OSError."""
        try:
            yield
        except OSError:
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        if guest in self._waiting:
            self._waiting.remove(guest)
        else:
            self._selector.unregister(guest.socket)
        self._guests.remove(guest)
        guest.socket.close()


class Forwarder(_End):
    """The generators' end: takes the records out of the ring of this node and sends them to its receiver."""

    def __init__(self, ring: Ring, store: Store, node: int):
        super().__init__(ring, store)
        self._acknowledged = 0  # records
        self._name = secrets.token_bytes(16)
        self._count = 0  # records taken out of the ring
        self._under_way: deque[tuple[int, bytes]] = deque()  # number and record
        self._address = store.get(f"relay/{node}").decode()
        self._moving = in_background(self._move, "forwarder")

    def wait(self, records: int) -> None:
        """Return when this many records have arrived in total."""
        while self._acknowledged < records:
            self.check()
            time.sleep(1e-2)

    def _move(self) -> None:
        host, _, port = self._address.removeprefix("tcp://").rpartition(":")
        self._patience = time.monotonic() + SILENT_SECONDS  # for the first answer
        while not self._closed.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), SILENT_SECONDS / 4) as self._socket:
                self._use_connection()
            self._closed.wait(RETRY_SECONDS)
            if time.monotonic() > self._patience:
                self._patience = math.inf
                what = f"{self._address}, where this node's samples go, has not answered for {SILENT_SECONDS} s"
                print(f"warning: {what}: is it closed to this node?", file=sys.stderr, flush=True)

    def _use_connection(self) -> None:
        """Send records until this end is closed. Raise OSError if the connection breaks."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = self._socket.recv(CHALLENGE, socket.MSG_WAITALL)
        self._socket.sendall(HELLO.pack(self._name, self._proof(challenge, self._name)))
        self._socket.setblocking(False)
        self._poller = select.poll()
        self._unread = b""
        self._heard = time.monotonic()
        self._is_met = False
        while not (self._is_met or self._closed.is_set()):
            self._wait_for(select.POLLIN, 0.1)
        for number, record in [*self._under_way]:
            self._send(number, record)
        while not self._closed.is_set():
            has_room = sum(len(record) for _, record in self._under_way) < UNDER_WAY
            self._wait_for(select.POLLIN, 0 if has_room else 0.05)
            if has_room:
                self._take()

    def _wait_for(self, events: int, seconds: float) -> bool:
        """Wait for any of the events, and read acknowledgements. Return whether the socket takes more. Raise OSError if the
        connection is broken."""
        self._poller.register(self._socket, events)
        found = sum(event for _, event in self._poller.poll(1000 * seconds))
        if found & ~select.POLLOUT:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            self._heard = time.monotonic()
            data = self._unread + data
            whole = len(data) // TAKEN.size * TAKEN.size
            self._unread = data[whole:]
            if whole:
                self._acknowledge(*TAKEN.unpack(data[whole - TAKEN.size : whole]))
        elif time.monotonic() > self._heard + SILENT_SECONDS:
            raise TimeoutError
        return bool(found & select.POLLOUT)

    def _take(self) -> None:
        try:
            record = self.ring.get(timeout=0.02)
        except RingTimeout:
            return
        self._under_way.append((self._count, record))
        self._count += 1
        self._send(*self._under_way[-1])

    def _send(self, number: int, record: bytes) -> None:
        for part in (HEAD.pack(number, len(record), xxhash.xxh3_64_intdigest(record)), record):
            left = memoryview(part)
            while left and not self._closed.is_set():
                if self._wait_for(select.POLLIN | select.POLLOUT, 0.1):
                    left = left[self._socket.send(left) :]

    def _acknowledge(self, taken: int) -> None:
        """Forget the records that have arrived. taken: number of records that the receiver has put into its ring so far."""
        self._is_met = True
        self._patience = math.inf
        while self._under_way and self._under_way[0][0] < taken:
            self._under_way.popleft()
        self._acknowledged = max(self._acknowledged, taken)
        watchdog.progress()

"""Samples between nodes: the records of a ring on a node without learners are sent over TCP into the ring of a node with
learners.

    node that only generates                                  node with learners
    generators -> ring -> Forwarder (a thread)  == TCP ==>  Receiver (a thread each) -> ring -> the learners' inbox

Each record arrives once and in order. A connection that breaks ends the run, as the loss of a rank does. No record is taken
from a ring while the next ring is full, so back pressure reaches the generators.

The port is open until all nodes have connected. A connection begins with the job's secret, which the job's ranks have from
torchrun's store. Nothing else is read from a stranger, and only the newest STRANGERS of them are kept, so whoever reaches the
port cannot fill the learner's memory. As with torch.distributed, nothing is encrypted: the job must be able to trust the
network between its nodes.
"""

import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections import deque
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import wait

import xxhash
from torch.distributed import Store

from rl.background import in_background
from rl.errors import RankLost, UserError
from rl.ranks import watchdog
from rl.transport.ring import Ring, RingTimeout

SECRET = 32  # bytes
HEAD = struct.Struct("<QQ")  # a record's length and checksum
STRANGERS = 64  # connections that have not said the secret; one more, and the oldest is closed
CONNECT_SECONDS = 20
RECORD_SECONDS = 0.1  # until a wait for a record looks for the end


def _own_address() -> str:
    """Return this machine's address on the network that leads to the job's first node. The first node itself returns its name
    if its /etc/hosts gives it a loopback address: other nodes can resolve the name. Sends nothing."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address = probe.getsockname()[0]
    return host if address.startswith("127.") else address


def _secret(store: Store) -> bytes:
    """Return the job's secret, which the first that asks has made."""
    return bytes(store.compare_set("relay/job", "", secrets.token_hex(SECRET // 2)))


class Receiver:
    """The learners' end: puts the records of other nodes into its ring."""

    def __init__(self, ring: Ring, store: Store, senders: list[int]):
        """senders: nodes that will connect."""
        self._address = ring.address
        self._secret = _secret(store)
        listener = socket.create_server(("", 0), backlog=128)
        self._moving: list[Future] = [in_background(partial(self._accept, listener, len(senders)), "receiver")]
        for sender in senders:
            store.set(f"relay/{sender}", f"{_own_address()}:{listener.getsockname()[1]}")

    def check(self) -> None:
        """Raise the errors of the connections."""
        for moving in [moving for moving in self._moving if moving.done()]:
            moving.result()

    def _accept(self, listener: socket.socket, senders: int) -> None:
        """Accept this many connections that know the secret, and close the port."""
        strangers: deque[socket.socket] = deque()
        listener.setblocking(False)
        while senders:
            for ready in wait([listener, *strangers]):
                if ready is listener:
                    with contextlib.suppress(OSError):  # it has hung up
                        strangers.append(ready.accept()[0])
                elif _says(ready, self._secret):
                    senders -= 1
                    self._moving.append(in_background(partial(self._move, ready), "receiver"))
                    strangers.remove(ready)
                else:
                    strangers.remove(ready)
                    ready.close()
            while len(strangers) > STRANGERS:
                strangers.popleft().close()
        for connection in (listener, *strangers):
            connection.close()

    def _move(self, connection: socket.socket) -> None:
        """Put the records of a connection into the ring until its other end has sent all."""
        ring = Ring.attach(self._address)  # a Ring object is for one thread
        with connection:
            while (head := _read(connection, HEAD.size)) is not None:
                size, checksum = HEAD.unpack(head)
                record = _read(connection, size)
                if record is None or xxhash.xxh3_64_intdigest(record) != checksum:
                    raise RuntimeError("a record from another node does not fit its checksum")
                ring.put(record, timeout=float("inf"))
        ring.close()


class Forwarder:
    """The generators' end: takes the records out of the ring of this node and sends them to its receiver."""

    def __init__(self, ring: Ring, store: Store, node: int):
        self._ring = Ring.attach(ring.address)  # a Ring object is for one thread
        self._is_ending = False
        self._count = 0  # records sent
        host, _, port = store.get(f"relay/{node}").decode().rpartition(":")
        try:
            self._connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        except OSError as error:
            raise UserError(
                f"{host}:{port}, where this node's samples go, cannot be reached from here ({error}). Open it to this node, or "
                "set GLOO_SOCKET_IFNAME and MASTER_ADDR to a network that joins all nodes."
            ) from None
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(_secret(store))
        self._moving = in_background(self._move, "forwarder")

    def check(self) -> None:
        """Raise the thread's error."""
        if self._moving.done():
            self._moving.result()

    def finish(self) -> None:
        """Return when all records of the ring, into which nobody writes any more, are in the ring of the other node."""
        self._is_ending = True
        self._moving.result()

    def _move(self) -> None:
        try:
            with self._connection as connection:
                while (record := self._take()) is not None:
                    connection.sendall(HEAD.pack(len(record), xxhash.xxh3_64_intdigest(record)))
                    connection.sendall(record)
                    self._count += 1
                    watchdog.progress()
                connection.shutdown(socket.SHUT_WR)
                if connection.recv(1):  # it closes when it has put all records into its ring
                    raise ConnectionError("the receiver spoke")
        except OSError as error:
            raise RankLost(f"connection lost to the node that takes this node's samples: {error}") from None

    def _take(self) -> bytes | None:
        """Return the next record; None if there will be no other."""
        while True:
            is_ending = self._is_ending  # before the ring is looked at
            try:
                return self._ring.get(timeout=0 if is_ending else RECORD_SECONDS)
            except RingTimeout:
                if is_ending:
                    return None


def _says(stranger: socket.socket, secret: bytes) -> bool:
    """Return whether the first bytes that have arrived are the secret. It is so short that it comes in one piece."""
    stranger.setblocking(False)
    try:
        said = stranger.recv(SECRET)
    except OSError:
        return False
    stranger.setblocking(True)
    return hmac.compare_digest(said, secret)


def _read(connection: socket.socket, size: int) -> bytearray | None:
    """Return the next `size` bytes; None at the end. Raise RankLost if the connection breaks."""
    data = bytearray(size)
    at = 0
    try:
        while at < size:
            if not (count := connection.recv_into(memoryview(data)[at:], 0, socket.MSG_WAITALL)):
                if at:
                    raise ConnectionError("it ended amid a record")
                return None
            at += count
    except OSError as error:
        raise RankLost(f"connection lost to a node that generates: {error}") from None
    return data

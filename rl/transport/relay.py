"""Samples between nodes: the records of a ring whose node has no learner travel over ZeroMQ into the ring of one that has.

    node that only generates                                node with learners
    generators -> ring -> Forwarder (a thread)  == TCP ==>  Receiver (a thread) -> ring -> the learners' inbox

What a generator sends is delivered once and in order, or the run stops. A record stays with the forwarder until the receiver
has put it into its ring and said so. After a broken connection, which ZeroMQ mends, all that was not acknowledged is sent
again; what had come already is left out by its number. Nothing is taken from a ring while the one behind it is full: so back
pressure reaches the generators.

Records travel in frames of 1 MiB at most, and a longer frame is refused: a stranger, who has not proved anything yet, can make
the receiver hold no more than one.

All that travels is encrypted, and both ends prove that they know the job's secret (CURVE, https://rfc.zeromq.org/spec/26). With
--cluster-key-file that is a file's. Otherwise the first to ask makes one up and leaves it in torchrun's store, which is as open
as the network that c10d and NCCL trust.
"""

import hashlib
import json
import math
import os
import secrets
import socket
import stat
import struct
import sys
import threading
import time
from collections import deque
from pathlib import Path

import xxhash
import zmq
from torch.distributed import Store
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import monitor, z85

from rl.errors import UserError
from rl.ranks import watchdog
from rl.transport.ring import RecordTooLarge, Ring, RingTimeout

HEAD = struct.Struct("<16sQQ")  # a forwarder's own name, the record's number, its checksum
UNDER_WAY = 64 << 20  # bytes that were sent and are not acknowledged yet
FRAME = 1 << 20  # bytes of a record that go into one frame
SILENT_SECONDS = 20  # after which a connection without a sign of life is taken for broken, and made again


def read_key(file: str) -> bytes:
    """The secret in a --cluster-key-file. Raises UserError for one that cannot be used."""
    try:
        content = Path(file).read_bytes().strip()
    except OSError as error:
        raise UserError(f"--cluster-key-file {file}: {error.strerror}. Give a file that is the same on all nodes.") from None
    if len(content) < 16:
        raise UserError(f"--cluster-key-file {file}: a secret of {len(content)} bytes is too short. Put at least 16 into it.")
    return content


def _secret(store: Store, file: str | None) -> bytes:
    if file is None:
        return bytes(store.compare_set("relay/secret", "", secrets.token_hex(32)))
    content = read_key(file)
    if Path(file).stat().st_mode & stat.S_IROTH:
        print(
            f"warning: --cluster-key-file {file} can be read by every user of this machine. Run: chmod o= {file}",
            file=sys.stderr,
        )
    return content


def _keys(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    """(public, private) of a role, the same wherever the secret is known."""
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
    return zmq.curve_public(private), private


def _fingerprint(secret: bytes) -> str:
    """Tells two secrets apart, and nothing about them."""
    return hashlib.blake2b(secret, digest_size=16, person=b"fingerprint").hexdigest()


def _own_address(towards: str | None) -> str:
    """This machine's address on the network over which a host, by default the job's first node, is reached; nothing is sent.
    That host's own is its name, if it knows itself by a loopback address (many an /etc/hosts says so): others resolve it."""
    host = towards or os.environ.get("MASTER_ADDR", "localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address = probe.getsockname()[0]
    return host if address.startswith("127.") else address


def _socket(context: zmq.Context, kind: int, keys: tuple[bytes, bytes]) -> zmq.Socket:
    end = context.socket(kind)
    end.curve_publickey, end.curve_secretkey = keys
    end.linger = 0
    end.maxmsgsize = FRAME + 1024  # of a frame, with what CURVE adds; ZeroMQ drops who announces more
    end.sndhwm = end.rcvhwm = 0  # the window bounds what is under way
    end.heartbeat_ivl, end.heartbeat_timeout = 1000 * SILENT_SECONDS // 4, 1000 * SILENT_SECONDS
    return end


class _Thread:
    """Moves records until it is closed. What goes wrong in it is raised in the main thread, by `check`."""

    def __init__(self, name: str):
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._move()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        if self._error:
            raise self._error

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self.check()


class Receiver(_Thread):
    """The learners' end: puts what comes from the nodes `senders`, who reach this one as they do `towards`, into its ring."""

    def __init__(
        self,
        ring: Ring,
        store: Store,
        senders: list[int | str],
        cluster_key_file: str | None = None,
        towards: str | None = None,
    ):
        self.ring = Ring.attach(ring.address)  # a ring object is one thread's end
        self.taken: dict[bytes, int] = {}  # forwarder -> records of it that are in the ring
        secret = _secret(store, cluster_key_file)
        self.context = zmq.Context()
        self.guard = ThreadAuthenticator(self.context)
        self.guard.start()
        self._client = _keys(secret, b"forwarder")[0]
        self.guard.configure_curve_callback(domain="*", credentials_provider=self)
        self.socket = _socket(self.context, zmq.ROUTER, _keys(secret, b"receiver"))
        self.socket.curve_server = True
        port = self.socket.bind_to_random_port("tcp://*")
        super().__init__("receiver")
        for sender in senders:
            store.set(f"relay/{sender}", json.dumps([f"tcp://{_own_address(towards)}:{port}", _fingerprint(secret)]))

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this public key is let in."""
        return key == self._client

    def _move(self) -> None:
        while not self._closed.is_set():
            if not self.socket.poll(100):
                continue
            sender, head, *frames = self.socket.recv_multipart()
            record = b"".join(frames)
            name, number, checksum = HEAD.unpack(head)
            if xxhash.xxh3_64_intdigest(record) != checksum:
                raise RuntimeError("a record from another node does not fit its checksum")
            taken = self.taken.setdefault(name, 0)
            if number == taken and self._put(record):
                self.taken[name] = taken + 1
            self.socket.send_multipart([sender, struct.pack("<Q", self.taken[name])])
        self.guard.stop()
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

    def __init__(self, ring: Ring, store: Store, node: int | str, cluster_key_file: str | None = None):
        self.ring = Ring.attach(ring.address)
        self.bytes = 0  # sent, without what was sent again
        self.acknowledged = 0  # records
        self._name, self._count = secrets.token_bytes(16), 0  # records that were taken out of the ring
        self._under_way: deque[list[bytes]] = deque()
        self.context = zmq.Context()
        secret = _secret(store, cluster_key_file)
        self.socket = _socket(self.context, zmq.DEALER, _keys(secret, b"forwarder"))
        self.socket.curve_serverkey = _keys(secret, b"receiver")[0]
        self._events = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        with watchdog.doing("a node with learners to listen for samples"):
            self._address, fingerprint = json.loads(store.get(f"relay/{node}"))
        if fingerprint != _fingerprint(secret):
            raise UserError("--cluster-key-file: the node with the learners has another secret. Give all nodes the same file.")
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
            with self.ring.get(timeout=0.02) as data:
                record = bytes(data)
        except RingTimeout:
            return
        head = HEAD.pack(self._name, self._count, xxhash.xxh3_64_intdigest(record))
        self._count += 1
        self._under_way.append([head, record])
        self._send(head, record)
        self.bytes += len(record)

    def _send(self, head: bytes, record: bytes) -> None:
        view = memoryview(record)
        self.socket.send_multipart([head, *(view[at : at + FRAME] for at in range(0, len(record), FRAME))])

    def _acknowledge(self, taken: int) -> None:
        """taken: records, from the first on, that are in the receiver's ring."""
        while self._under_way and HEAD.unpack(self._under_way[0][0])[1] < taken:
            self._under_way.popleft()
        self.acknowledged = max(self.acknowledged, taken)
        watchdog.progress()

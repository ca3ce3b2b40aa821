"""A ring of records in shared memory, between the processes of one node: many writers, one reader, no pickle.

    ring = Ring.create(256 << 20)            # one process makes it and hands `ring.address` to the others
    ring = Ring.attach(address)              # they join
    ring.put(b"header", array)               # waits while the ring is full
    data = ring.get(timeout=5)               # waits while it is empty

The memory is a memfd: it never has a name in the file system, other users cannot open it, and the kernel frees it when the last
process that holds it ends, for any reason. Even a SIGKILL of all processes leaves nothing behind.

The ring is an endless stream of bytes with two positions, tail <= head: writers move the head, the reader moves the tail. A
writer that finds the ring empty begins at the start of the memory again, so that no more memory is ever touched than was in use
at once: a touched page of shared memory counts as memory of every process that touches it.
Any process may be killed at any instruction:
- A writer fills free space and then commits with a single store of `head`. If killed before, it changed nothing that counts.
- The reader frees a record with a single store of `tail`. If killed before, it leaves the record where it is.
- One writer writes at a time: the mutex is a lock on the file, which the kernel drops when its holder dies.

The ring does not depend on the order in which a processor makes stores visible (Arm): both sides pass a barrier between the
data and the word that announces it. The reader checks each record's checksum.

Left out: more than one node, several readers (a node's first learner reads for all), an order among writers that wait for room.
A `Ring` object is for one thread. A forked child shares its parent's end, including locks, so it must attach again.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock

import xxhash
from xxhash import xxh3_64_intdigest as _digest  # of (data, seed)

ALIGN = 64  # a cache line: records and their data start on one, and so do the words that different sides write
HEADER = struct.Struct("<QQ")  # size, and checksum of the data with a seed of position and size
FILLER = 1 << 63  # marks the size of a filler, at the end of the ring before a record that would wrap
# Indices of the 64-bit words in the first page: the writers', and the reader's
HEAD, BASE, TAIL = 0, 1, 8  # base: the position at the start of the memory
PAGE = 4096  # bytes of these words; the records follow
CHUNK = 1 << 18  # bytes hashed and copied while they are in the cache


class RingTimeout(TimeoutError):
    """A timeout: the ring stayed full or empty, or another process kept the mutex, for as long as the caller would wait."""


class RecordTooLarge(ValueError):
    """A record larger than the ring's maximum."""


class RecordDamaged(RuntimeError):
    """A committed record that does not match its checksum."""


class Ring:
    """One process's end of the ring. See the top of the file."""

    def __init__(self, fd: int):
        self.fd = fd
        self._map = mmap.mmap(fd, 0)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:PAGE].cast("Q")  # an item is read or written by a single load or store of 8 bytes
        self.capacity = len(self._map) - PAGE
        self.max_record = self.capacity // 2 - ALIGN  # so that a record always fits into an empty ring, wherever the head is
        self._barrier = Barrier()

    @staticmethod
    def create(capacity: int) -> "Ring":
        """Return a new ring of `capacity` bytes; a record may take almost half of them."""
        fd = os.memfd_create("rl-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE + max(1, -(-capacity // PAGE)) * PAGE)
        os.fchmod(fd, 0o600)
        return Ring(fd)

    @staticmethod
    def attach(address: str) -> "Ring":
        """Return the ring of another process of this machine and user. Raise OSError if it has exited."""
        return Ring(os.open(address, os.O_RDWR | os.O_CLOEXEC))

    @property
    def address(self) -> str:
        """The address for `attach`, valid as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def occupancy(self) -> float:
        """The fraction of the ring in use."""
        tail = self._words[TAIL]  # read first: writes in between only add
        return min(1.0, (self._words[HEAD] - tail) / self.capacity)

    def close(self) -> None:
        if self.fd < 0:
            return
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self.fd)  # this also drops its lock
        self.fd = -1

    # -- writing

    def put(self, *parts, timeout: float = 600.0) -> None:
        """Write the parts (any buffers), end to end, as one record. Raise RecordTooLarge if it is too large, and RingTimeout if
        there is no room or no turn within this many seconds; then nothing is written."""
        views = [_flat(part) for part in parts]
        size = sum(map(len, views))
        if size > self.max_record:
            raise RecordTooLarge(f"a record of {size:,} bytes does not fit; this ring takes up to {self.max_record:,}")
        if not self._write(views, size) and not wait(lambda: self._write(views, size), timeout):
            raise RingTimeout(f"no room for {_footprint(size):,} bytes in {timeout} s; {self.occupancy:.0%} are in use")

    def _write(self, parts: list[memoryview], size: int) -> bool:
        """Write and commit the record, if nobody else is writing and there is room. Return whether it is written."""
        try:
            flock(self.fd, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            return False
        try:
            words = self._words
            head = start = words[HEAD]
            if words[TAIL] == head:  # empty: until the head moves, nobody reads the base
                self._barrier()  # the reader has finished with the bytes that are overwritten now
                words[BASE] = head
            left = self.capacity - (head - words[BASE]) % self.capacity
            if _footprint(size) > left:  # records do not wrap
                start += left
            end = start + _footprint(size)
            if end > words[TAIL] + self.capacity:
                return False
            self._barrier()  # the writes below come after the reader's reads there
            if start > head:
                filler = FILLER | (start - head - ALIGN)
                HEADER.pack_into(self._bytes, self._at(head), filler, _digest(b"", head ^ filler))
            HEADER.pack_into(self._bytes, self._at(start), size, self._copy(parts, size, start))
            self._barrier()
            words[HEAD] = end  # the commit
            return True
        finally:
            flock(self.fd, LOCK_UN)

    def _copy(self, parts: list[memoryview], size: int, position: int) -> int:
        """Copy the parts into the record at the position and return their checksum."""
        at = self._at(position) + ALIGN
        checksum = xxhash.xxh3_64(seed=position ^ size)
        for part in parts:
            for start in range(0, len(part), CHUNK):
                piece = part[start : start + CHUNK]
                checksum.update(piece)
                self._bytes[at : at + len(piece)] = piece
                at += len(piece)
        return checksum.intdigest()

    # -- reading

    def get(self, timeout: float = 600.0, into: memoryview | None = None) -> bytes | None:
        """Return the oldest record, or copy it into memory of its length, and free its space. Raise RingTimeout if none arrives
        within this many seconds, and RecordDamaged for a record that was changed after it was written."""
        words = self._words
        position = words[TAIL]
        if words[HEAD] == position and not wait(lambda: words[HEAD] != position, timeout):
            raise RingTimeout(f"no record in {timeout} s")
        self._barrier()  # makes the data written before this head visible
        size, data = self._read(position)
        if size & FILLER:  # a record follows it: they were committed together
            position += _footprint(size & ~FILLER)
            size, data = self._read(position)
        found = bytes(data) if into is None else None
        if into is not None:
            into[:] = data
        self._barrier()  # the reads above come before the store below
        words[TAIL] = position + _footprint(size)
        return found

    def _read(self, position: int) -> tuple[int, memoryview]:
        """Return (size, data) of the record at the position; a filler has no data."""
        at = self._at(position)
        size, checksum = HEADER.unpack_from(self._bytes, at)
        length = 0 if size & FILLER else size
        data = self._bytes[at + ALIGN : at + ALIGN + length]
        if len(data) != length or _digest(data, position ^ size) != checksum:
            raise RecordDamaged(f"the ring's record at {position} does not fit its checksum")
        return size, data

    # -- both

    def _at(self, position: int) -> int:
        return PAGE + (position - self._words[BASE]) % self.capacity


class Barrier:
    """A memory barrier: to other processes, all loads and stores above a call happen before all below it. By POSIX a lock
    orders memory: nothing from above moves below its release, nothing from below moves above its acquisition, and these two
    keep their order. For one thread at a time."""

    def __init__(self):
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def __call__(self) -> None:
        self._release()
        self._acquire()


def _flat(part) -> memoryview:
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view without bytes cannot be cast


def _footprint(size: int) -> int:
    """Return how many bytes of the ring a record with this many bytes of data takes."""
    return ALIGN - (-size // ALIGN) * ALIGN


def wait(ready: Callable[[], bool], timeout: float) -> bool:
    """Call `ready` until it returns True: at once, then after naps of 20 microseconds growing to 2 milliseconds, which take
    about 1% of a core. Return False after this many seconds."""
    deadline = time.monotonic() + timeout
    nap = 20e-6
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(nap)
        nap = min(2 * nap, 2e-3)
    return True

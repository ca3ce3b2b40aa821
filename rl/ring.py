"""A ring of records in shared memory, between the processes of one node: several writers, several readers, no pickle.

    ring = Ring.create(256 << 20)            # one process makes it and hands `ring.address` to the others
    ring = Ring.attach(address)              # they join
    ring.put(b"header", array)               # waits while the ring is full
    with ring.get(timeout=5) as record:      # waits while it is empty; record.data is a view, nothing is copied
        ...

The memory is a memfd: it never has a name in the file system, other users cannot open it, and the kernel frees it when the
last process that holds it ends, however that ends. Not even a SIGKILL of everything leaves something behind.

Any process may be killed at any instruction:
- A writer fills free space and then commits with a single store of `head`. Killed before, it has changed nothing that counts.
- A reader marks a record as taken, and as done when it is released. If it dies in between, another reader gets the record:
  each is handled at least once, and its space comes back.
- The mutexes are locks on byte ranges of the file, which the kernel drops with their holder: one for the writers' turn, one
  held while something is written, one for readers. So is the sign that a reader lives.

Nothing leans on the order in which stores become visible (Arm): each side reads the other's words under the other's lock, with
one exception. A reader looks at `head` without asking the writers, and trusts no record whose header and checksum do not
fit; only if they still do not under the writers' lock, which orders all that the writer did, is the record damaged.

Left out: more than one node, priorities. One `Ring` object per process and thread.
"""

import contextlib
import fcntl
import functools
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

PAGE = 4096  # the ring's own words; records begin behind it
ALIGN = 64  # a cache line: records start on one, and so do the words that different sides write
HEADER = struct.Struct("<QQQQII")  # position, size, checksum of the payload, check of the header, state, owner
STATE = struct.Struct("<II")  # state and owner alone, at the header's end
STATE_AT = HEADER.size - STATE.size
HEAD, TAIL, CURSOR, CAPACITY, NEXT_OWNER, WAITING, COUNTS = 0, 8, 16, 24, 25, 26, 32  # places of the 64-bit words
READY, TAKEN, DONE, SKIP = 0x59444152, 0x4E4B4154, 0x454E4F44, 0x50494B53  # a record's state; SKIP fills the end before a wrap
STATES = {READY, TAKEN, DONE, SKIP}
MAGIC = 0x52494E47_5245434F
CHUNK = 1 << 18  # bytes copied and then hashed while they are in the cache
TURN, WRITING, READING, ALIVE = 0, 1, 2, 1024  # bytes of the file that stand for the mutexes, and the first owner's
LOCK_NAMES = {TURN: "another writer kept its turn", WRITING: "a writer kept its lock", READING: "a reader kept its lock"}


class RingTimeout(TimeoutError):
    """The ring stayed full or empty, or a mutex stayed taken, for as long as the caller would wait."""


class RecordTooLarge(ValueError):
    """The record is larger than the ring's stated maximum."""


class RecordDamaged(RuntimeError):
    """A committed record does not fit its checksum. It is skipped: the next `get` goes on behind it."""


@dataclass
class Record:
    """A record that this reader holds: `data` is a read-only view of the ring, valid until `release`."""

    data: memoryview
    position: int  # where it begins in the endless stream of bytes: unique, and growing with each record
    redelivered: bool  # another reader had taken it and died
    _ring: "Ring"

    def release(self) -> None:
        """Gives the space back. Raises BufferError while an array still looks at `data`."""
        if self._ring is not None:
            self.data.release()
            self._ring._release(self.position)
            self._ring = None

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_) -> None:
        self.release()


class Ring:
    """One process's end of the ring. See the top of the file."""

    def __init__(self, fd: int):
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:PAGE].cast("Q")
        self.capacity = self._words[CAPACITY]
        self.max_record = self.capacity // 2 - ALIGN  # so that one always fits into an empty ring, wherever the head is
        self._turn, self._writing, self._reading = (_Lock(fd, byte) for byte in (TURN, WRITING, READING))
        self._owner = 0  # this reader's number; drawn at its first `get`
        self._next_check = 0.0  # when to look for the records of dead readers again
        self._tail = 0  # what the writers know of the tail: never too far

    @staticmethod
    def create(capacity: int) -> "Ring":
        """A new ring of `capacity` bytes; a record may have almost half of them."""
        capacity = -(-capacity // PAGE) * PAGE
        fd = os.memfd_create("rl-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE + capacity)
        os.fchmod(fd, 0o600)
        os.pwrite(fd, struct.pack("<QQ", capacity, 1), 8 * CAPACITY)
        return Ring(fd)

    @staticmethod
    def attach(address: str) -> "Ring":
        """The ring of another process of this machine and user; raises OSError if that process has gone."""
        return Ring(os.open(address, os.O_RDWR | os.O_CLOEXEC))

    @property
    def address(self) -> str:
        """For `attach`, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def occupancy(self) -> float:
        """The part of the ring that is in use, 0 to 1."""
        return min(1.0, max(0, self._words[HEAD] - self._words[TAIL]) / self.capacity)

    @property
    def counts(self) -> dict[str, int]:
        """Records written, released, redelivered and found damaged so far, by all processes."""
        names = ("written", "released", "redelivered", "damaged")
        return {name: self._words[COUNTS + i] for i, name in enumerate(names)}

    def state(self) -> str:
        """One line for whoever asks what the ring is doing."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{self.occupancy:.0%} of {self.capacity >> 20} MiB in use; {counts}"

    def close(self) -> None:
        """Leaves the ring; records still held go to other readers."""
        if self._owner:
            _unlock(self.fd, ALIVE + self._owner)
        with contextlib.suppress(BufferError):  # a view is still about: the mapping goes when it does
            self._words.release()
            self._bytes.release()
            self._map.close()
        os.close(self.fd)

    # -- writing

    def put(self, *parts, timeout: float = 600.0) -> None:
        """Writes the parts (any buffers), end to end, as one record. Raises RecordTooLarge, or RingTimeout if the ring stays
        full: nothing is written then."""
        parts = [memoryview(part).cast("B") for part in parts]
        size = sum(len(part) for part in parts)
        if size > self.max_record:
            raise RecordTooLarge(f"a record of {size:,} bytes does not fit; this ring takes up to {self.max_record:,}")
        deadline = time.monotonic() + timeout
        # The fast path, unless another writer waits for room: it must not be overtaken for ever.
        if not self._words[WAITING] and self._write(parts, size, deadline):
            return
        with self._turn.by(deadline):
            self._words[WAITING] = 1
            try:
                _wait(lambda: self._write(parts, size, deadline), deadline, "the ring stayed full")
            finally:
                self._words[WAITING] = 0

    def _write(self, parts: list[memoryview], size: int, deadline: float) -> bool:
        """Writes and commits one record if there is room for it."""
        needed = _aligned(HEADER.size + size)
        for refreshed in (False, True):
            with self._writing.by(deadline):
                head = self._words[HEAD]
                left = self.capacity - head % self.capacity
                skip = left if needed > left else 0  # records do not wrap
                end = head + skip + needed
                if end - self._tail <= self.capacity:
                    if skip:
                        self._write_header(head, left - HEADER.size, 0, SKIP)
                    checksum = self._copy(parts, head + skip)
                    self._write_header(head + skip, size, checksum, READY)
                    self._words[COUNTS] += 1
                    self._words[HEAD] = end  # the commit
                    return True
            if not refreshed:  # not under the lock above: a reader may hold this one and wait for that
                with self._reading.by(deadline):
                    self._advance_tail()
                    self._tail = self._words[TAIL]
        return False

    def _copy(self, parts: list[memoryview], position: int) -> int:
        at = self._at(position) + HEADER.size
        if len(parts) == 1 and len(parts[0]) <= CHUNK:
            self._bytes[at : at + len(parts[0])] = parts[0]
            return _digest(parts[0], position)
        checksum = xxhash.xxh3_64(seed=position)
        for part in parts:
            for start in range(0, len(part), CHUNK):
                piece = part[start : start + CHUNK]
                end = at + len(piece)
                self._bytes[at:end] = piece
                checksum.update(self._bytes[at:end])
                at = end
        return checksum.intdigest()

    def _write_header(self, position: int, size: int, checksum: int, state: int) -> None:
        check = _check(position, size, checksum)
        HEADER.pack_into(self._bytes, self._at(position), position, size, checksum, check, state, 0)

    # -- reading

    def get(self, timeout: float = 600.0) -> Record:
        """The oldest record that nobody has. Raises RingTimeout if there is none in time, RecordDamaged for one that was
        changed after it was written."""
        deadline = time.monotonic() + timeout
        if not self._owner:
            self._register(deadline)
        taken = self._take(deadline)
        if taken is None:
            taken = _wait(lambda: self._take(deadline), deadline, "the ring stayed empty")
        position, size, checksum, redelivered = taken
        start = self._at(position) + HEADER.size
        data = self._bytes[start : start + size].toreadonly()
        if _digest(data, position) != checksum:
            with self._writing.by(deadline):  # all that the writer did is visible now
                fits = _digest(data, position) == checksum
            if not fits:
                data.release()
                self._release(position, damaged=1)
                raise RecordDamaged(f"the ring's record at {position} does not fit its checksum; {self.state()}")
        return Record(data, position, redelivered, self)

    def _take(self, deadline: float) -> tuple[int, int, int, bool] | None:
        """Marks the next record as this reader's: (position, size, checksum, redelivered), or None if there is none."""
        check = time.monotonic() >= self._next_check
        if self._words[CURSOR] == self._words[HEAD] and not check:
            return None  # nothing new, and no lock for nothing
        with self._reading.by(deadline):
            abandoned = self._abandoned() if check else None
            found = abandoned or self._next_unread(deadline)
            if found is None:
                return None
            position, size, checksum = found
            self._set_state(position, TAKEN, self._owner)
            if abandoned:
                self._words[COUNTS + 2] += 1
            else:
                self._words[CURSOR] = position + _aligned(HEADER.size + size)
            return position, size, checksum, bool(abandoned)

    def _next_unread(self, deadline: float) -> tuple[int, int, int] | None:
        """(position, size, checksum) of the record at the cursor; the cursor goes over what fills the end of the ring."""
        while (position := self._words[CURSOR]) != self._words[HEAD]:
            header = self._read_header(position)
            if header is None:  # damaged, or not visible yet
                with self._writing.by(deadline):
                    header, head = self._read_header(position), self._words[HEAD]
                if position == head:
                    return None
                if header is None:
                    self._words[CURSOR] = position + self._repair(position, head)
                    raise RecordDamaged(f"the header of the ring's record at {position} is damaged; {self.state()}")
            size, checksum, state, _ = header
            if state != SKIP:
                return position, size, checksum
            self._set_state(position, DONE, 0)
            self._words[CURSOR] = position + HEADER.size + size
        return None

    def _repair(self, position: int, limit: int) -> int:
        """Makes one record of all between a damaged header and the next good one, marks it as done, and returns its bytes."""
        end = position + ALIGN
        wrap = position + self.capacity - position % self.capacity
        while end < min(limit, wrap) and self._read_header(end) is None:
            end += ALIGN
        self._write_header(position, end - position - HEADER.size, 0, DONE)
        self._words[COUNTS + 3] += 1
        return end - position

    def _abandoned(self) -> tuple[int, int, int] | None:
        """The oldest record taken by a reader that is dead; looked for a few times a second."""
        self._next_check = time.monotonic() + 0.2
        self._advance_tail()
        position, cursor, alive = self._words[TAIL], self._words[CURSOR], {self._owner: True}
        while position < cursor:
            size, checksum, state, owner = self._known_header(position, cursor)
            if state == TAKEN and owner not in alive:
                alive[owner] = self._is_alive(owner)
            if state == TAKEN and not alive[owner]:
                self._next_check = 0.0  # there may be more
                return position, size, checksum
            position += _aligned(HEADER.size + size)
        return None

    def _release(self, position: int, damaged: int = 0) -> None:
        with self._reading.by(time.monotonic() + 600):
            self._set_state(position, DONE, 0)
            self._words[COUNTS + 1] += 1
            self._words[COUNTS + 3] += damaged
            if position == self._words[TAIL]:
                self._advance_tail()

    def _advance_tail(self) -> None:
        """Gives the space of the oldest records back, as far as they are done. Under the readers' lock."""
        tail, cursor = self._words[TAIL], self._words[CURSOR]
        while tail < cursor:
            size, _, state, _ = self._known_header(tail, cursor)
            if state != DONE:
                break
            tail += _aligned(HEADER.size + size)
        self._words[TAIL] = tail

    def _known_header(self, position: int, limit: int) -> tuple[int, int, int, int]:
        """The header of a record that was read before; if it has been damaged since, that of what replaces it."""
        header = self._read_header(position)
        if header is None:
            self._repair(position, limit)
            header = self._read_header(position)
        return header

    def _register(self, deadline: float) -> None:
        """Draws a number for this reader; a lock on its byte says that it lives."""
        with self._reading.by(deadline):
            self._owner = self._words[NEXT_OWNER]
            self._words[NEXT_OWNER] = self._owner + 1
        _try_lock(self.fd, ALIVE + self._owner)

    def _is_alive(self, owner: int) -> bool:
        free = _try_lock(self.fd, ALIVE + owner)
        if free:
            _unlock(self.fd, ALIVE + owner)
        return not free

    # -- headers, words, locks

    def _at(self, position: int) -> int:
        return PAGE + position % self.capacity

    def _read_header(self, position: int) -> tuple[int, int, int, int] | None:
        """(size, checksum, state, owner) of the record at the position; None if none is there."""
        where, size, checksum, check, state, owner = HEADER.unpack_from(self._bytes, self._at(position))
        if where != position or check != _check(position, size, checksum) or state not in STATES:
            return None
        return size, checksum, state, owner

    def _set_state(self, position: int, state: int, owner: int) -> None:
        STATE.pack_into(self._bytes, self._at(position) + STATE_AT, state, owner)


class _Lock:
    """A mutex between processes: a lock on one byte of the file, which the kernel drops if the holder dies."""

    def __init__(self, fd: int, byte: int):
        self.fd, self.byte, self.deadline = fd, byte, 0.0

    def by(self, deadline: float) -> "_Lock":
        """For `with`: waits no longer than until then (time.monotonic), or raises RingTimeout."""
        self.deadline = deadline
        return self

    def __enter__(self) -> None:
        if not _try_lock(self.fd, self.byte):
            _wait(lambda: _try_lock(self.fd, self.byte), self.deadline, LOCK_NAMES[self.byte])

    def __exit__(self, *_) -> None:
        _unlock(self.fd, self.byte)


def _try_lock(fd: int, byte: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, byte))
    except BlockingIOError:
        return False
    return True


def _unlock(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, byte))


@functools.lru_cache(maxsize=64)
def _range(kind: int, byte: int) -> bytes:
    """struct flock of one byte. Locks of the open file (OFD) rather than of the process: the same process may open it twice."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _check(position: int, size: int, checksum: int) -> int:
    return position * 3 ^ size * 5 ^ checksum ^ MAGIC


def _digest(data: memoryview, position: int) -> int:
    return xxhash.xxh3_64_intdigest(data, position)


def _wait(ready: Callable, deadline: float, otherwise: str):
    """Calls `ready` until it returns something true, and returns that: at once, then after naps of 20 microseconds growing to
    2 milliseconds, which is under 1% of a core. Raises RingTimeout at the deadline."""
    nap = 20e-6
    while not (result := ready()):
        if time.monotonic() > deadline:
            raise RingTimeout(otherwise)
        time.sleep(nap)
        nap = min(2 * nap, 2e-3)
    return result

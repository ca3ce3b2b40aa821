"""A ring of records in shared memory, between the processes of one node: several writers, several readers, no pickle.

    ring = Ring.create(256 << 20)            # one process makes it and hands `ring.address` to the others
    ring = Ring.attach(address)              # they join
    ring.put(b"header", array)               # waits while the ring is full
    with ring.get(timeout=5) as record:      # waits while it is empty; record.data is a view, nothing is copied
        ...

The memory is a memfd: it never has a name in the file system, other users cannot open it, and the kernel frees it when the
last process that holds it ends, however that ends. Not even a SIGKILL of everything leaves something behind.

The ring is an endless stream of bytes with three places in it, tail <= cursor <= head: writers move the head, readers move the
cursor over what they take. The tail is not stored: it is the oldest record that a reader holds, or else the cursor.

Any process may be killed at any instruction:
- A writer fills free space and then commits with a single store of `head`. Killed before, it has changed nothing that counts.
- A reader writes what it takes into a table, and crosses it out again with a single store. If it dies in between, another
  reader gets the record, marked as redelivered: each is handled at least once, and its space comes back.
- The mutexes are locks on byte ranges of the file, which the kernel drops with their holder: one for the writer, one for the
  reader that takes, one for the queue before a full ring. So are a place in that queue and the sign that a reader lives.

Nothing leans on the order in which a processor makes stores visible (Arm): both sides pass a barrier between the data and the
word that announces it. And a reader hands out no record whose header and checksum do not fit.

Left out: more than one node, priorities. One `Ring` object per thread; after a fork, parent and child each have their own end.
"""

import collections
import contextlib
import functools
import mmap
import os
import secrets
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fcntl import F_OFD_GETLK, F_OFD_SETLK, F_UNLCK, F_WRLCK, fcntl

import xxhash
from xxhash import xxh3_64_intdigest as _digest  # of (data, seed)

ALIGN = 64  # a cache line: records and their data start on one, and so do the words that different sides write
HEADER = struct.Struct("<QQQQ")  # position, size, checksum of the data, checksum of these three
CHECKED = struct.Struct("<QQQ")  # the three
FILLER = 1 << 63  # in the size of what fills the end of the ring before a record that would wrap
MAX_HELD = 4096  # records that all readers together can hold
AHEAD = 16  # records of up to a page that a reader takes at once while it is the only one: a lock costs as much as all the rest
# Places of the 64-bit words. The table of held records has a column of position + 1 (0: free) and one of owners.
HEAD, WRITTEN, CURSOR, TAKEN, REDELIVERED, DAMAGED, USED, NEXT_OWNER = 0, 1, 8, 9, 10, 11, 12, 13
WAITING, NEXT_TICKET, KEY, CAPACITY = 16, 17, 24, 25
HELD, OWNERS = 64, 64 + MAX_HELD
PAGE = 4096
CONTROL = -(-8 * (OWNERS + MAX_HELD) // PAGE) * PAGE  # bytes of these words; records begin behind them
CHUNK = 1 << 18  # bytes copied and then hashed while they are in the cache; a record up to that is small
# Bytes of the file that stand for the mutexes, of the readers' lives and of the writers' places in the queue.
WRITING, READING, TURN, ALIVE, QUEUE = 0, 1, 2, 1 << 32, 1 << 40
LOCK_HOLDERS = {READING: "a reader", TURN: "another writer"}
CHECK_SECONDS = 0.2  # how often a reader looks for the records of dead readers


Batch = list[tuple[list[memoryview], int]]  # records to be written: parts and size of each
Taken = tuple[int, int, int, int, bool]  # a record of this reader's: position, size, checksum, line of the table, redelivered


class RingTimeout(TimeoutError):
    """The ring stayed full or empty, or a mutex stayed taken, for as long as the caller would wait."""


class RecordTooLarge(ValueError):
    """The record is larger than the ring's stated maximum."""


class RecordDamaged(RuntimeError):
    """A committed record does not fit its checksum. It is skipped: the next `get` goes on behind it."""


@dataclass(slots=True)
class Record:
    """A record that this reader holds: `data` is a read-only view of the ring, valid until `release`.

    Slices of it and numpy arrays over it may not outlive it, and `release` sees to that. Of torch.frombuffer it cannot know:
    take torch.from_numpy(numpy.frombuffer(...)).
    """

    data: memoryview
    position: int  # where it begins in the endless stream of bytes: unique, and growing with each record
    redelivered: bool  # another reader had taken it and died
    _ring: "Ring | None"
    _place: int
    _owner: int

    def release(self) -> None:
        """Gives the space back. Raises BufferError, and keeps the record, while a slice or an array still looks at `data`."""
        if self._ring is not None:
            self.data.release()
            self._ring._release(self._place, self._owner)
            self._ring = None

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.release()
        except BufferError:
            if kind is None:  # else the frames of the error under way still look: it goes on, and the record stays held
                raise


class Ring:
    """One process's end of the ring. See the top of the file."""

    def __init__(self, fd: int):
        self.fd = fd
        # Mapped through another open file: a mapping keeps its open file, with all locks of that, alive in a forked child.
        mapped = _reopen(fd)
        self._map = mmap.mmap(mapped, os.fstat(fd).st_size)
        os.close(mapped)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:CONTROL].cast("Q")  # an item is read or written by a single load or store of 8 bytes
        self.capacity = self._words[CAPACITY]
        self.max_record = self.capacity // 2 - ALIGN  # so that one always fits into an empty ring, wherever the head is
        self._key = self._words[KEY]
        self._references = sys.getrefcount(self._map)  # and one more for each record that is looked at
        self._records = 0  # held here
        self._limit = 0  # how far the head may go, as far as this writer knows: never too far
        self._start()
        _rings.add(self)

    def _start(self) -> None:
        """What a forked child begins anew."""
        self._owner = 0  # this reader's number; drawn at its first `get`
        self._place = 0  # of its last record: most likely free again
        self._ahead: collections.deque[Taken] = collections.deque()  # its records that `get` has not handed out yet
        self._alone = 0  # the next reader's number, if there was no other reader when this one looked
        self._next_check = 0.0  # when to look for the records of dead readers
        lock = threading.Lock()
        lock.acquire()
        self._unlock_and_lock = lock.release, lock.acquire  # for `_barrier`

    @staticmethod
    def create(capacity: int) -> "Ring":
        """A new ring of `capacity` bytes; a record may have almost half of them."""
        capacity = max(1, -(-capacity // PAGE)) * PAGE
        key = secrets.randbits(63) | 1
        fd = os.memfd_create(f"rl-ring-{key:x}", os.MFD_CLOEXEC)
        os.ftruncate(fd, CONTROL + capacity)
        os.fchmod(fd, 0o600)
        for place, value in ((KEY, key), (CAPACITY, capacity), (NEXT_OWNER, 1), (USED, 1)):
            os.pwrite(fd, struct.pack("Q", value), 8 * place)
        return Ring(fd)

    @staticmethod
    def attach(address: str) -> "Ring":
        """The ring of another process of this machine and user; raises OSError if that process has gone or closed it."""
        path, _, key = address.partition("#")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(fd, 8, 8 * KEY) != bytes.fromhex(key):  # the numbers of a process and its files are used again
            os.close(fd)
            raise FileNotFoundError(f"{path} is no longer this ring")
        return Ring(fd)

    @property
    def address(self) -> str:
        """For `attach`, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}#{struct.pack('Q', self._key).hex()}"

    @property
    def occupancy(self) -> float:
        """The part of the ring that is in use, 0 to 1."""
        tail = self._tail()
        return min(1.0, (self._words[HEAD] - tail) / self.capacity)

    @property
    def counts(self) -> dict[str, int]:
        """Records written, released, redelivered and found damaged so far, by all processes. One killed in between may have
        counted a record that it did not get to write or take."""
        released = max(0, self._words[TAKEN] - len(self._held()))
        counts = {"written": self._words[WRITTEN], "released": released}
        return counts | {"redelivered": self._words[REDELIVERED], "damaged": self._words[DAMAGED]}

    def state(self) -> str:
        """One line for whoever asks what the ring is doing."""
        counts, part = self.counts, self.occupancy
        used = f"{part:.0%} of {self.capacity >> 20} MiB in use by {counts['written'] - counts['released']} records"
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        return f"{used} ({part * self.capacity:,.0f} bytes), {len(self._held())} records held; {told}"

    def close(self) -> None:
        """Leaves the ring; records still held go to other readers."""
        if self.fd < 0:
            return
        _rings.discard(self)
        self._owner = 0
        with contextlib.suppress(BufferError):  # a view is still about: the mapping goes when it does
            self._words.release()
            self._bytes.release()
            self._map.close()
        os.close(self.fd)  # and all locks with it
        self.fd = -1

    # -- writing

    def put(self, *parts, timeout: float = 600.0) -> None:
        """Writes the parts (any buffers), end to end, as one record. Raises RecordTooLarge, or RingTimeout if there is neither
        room nor a turn in so many seconds: nothing is written then."""
        parts = [_flat(part) for part in parts]
        self._put([(parts, self._checked(sum(map(len, parts))))], timeout)

    def put_many(self, records: Iterable, timeout: float = 600.0) -> None:
        """Writes each of the buffers as a record of its own, small ones several at a time: one lock and one commit for all of
        them. Raises as `put` does, for a record that is too large before anything is written; after a RingTimeout the first
        of them are there, none in part."""
        parts = [_flat(record) for record in records]
        sizes = [self._checked(len(part)) for part in parts]
        batch, filled, limit = [], 0, min(CHUNK, self.capacity // 4)  # so that it fits into an empty ring, wherever the head is
        for part, size in zip(parts, sizes, strict=True):
            if batch and filled + _taken_by(size) > limit:
                self._put(batch, timeout)
                batch, filled = [], 0
            batch.append(([part], size))
            filled += _taken_by(size)
        if batch:
            self._put(batch, timeout)

    def _checked(self, size: int) -> int:
        if size > self.max_record:
            raise RecordTooLarge(f"a record of {size:,} bytes does not fit; this ring takes up to {self.max_record:,}")
        return size

    def _put(self, batch: Batch, timeout: float) -> None:
        # Those who wait must not be overtaken for ever, so a large record queues behind them. A small one may pass while half
        # of the ring is free: no record needs more, and else the queue would never end when several write all the time.
        size = sum(_taken_by(size) for _, size in batch)
        waiting = self._words[WAITING]
        if (waiting and size > CHUNK) or not self._write(batch, self.capacity // 2 if waiting else 0):
            self._write_in_turn(batch, size, timeout)

    def _write_in_turn(self, batch: Batch, size: int, timeout: float) -> None:
        """Queues for room: a ticket's byte is locked as long as its holder waits, and those before go first."""
        deadline = time.monotonic() + timeout
        with self._locked(TURN, deadline):
            ticket = self._words[NEXT_TICKET]
            _try_lock(self.fd, QUEUE + ticket)
            self._words[NEXT_TICKET] = ticket + 1
            self._words[WAITING] = 1

        def written() -> bool:
            return not (ticket and _is_locked(self.fd, QUEUE, ticket)) and self._write(batch)

        try:
            _wait(written, deadline, lambda: f"no room for {size:,} bytes in {timeout} s; {self.state()}")
        finally:
            _unlock(self.fd, QUEUE + ticket)
            if _try_lock(self.fd, TURN):  # else whoever comes or goes right now sees to it, or the next one
                self._words[WAITING] = _is_locked(self.fd, QUEUE, 0)
                _unlock(self.fd, TURN)

    def _write(self, batch: Batch, spare: int = 0) -> bool:
        """Writes and commits the records, if nobody else is writing and there is room for them and `spare` bytes more."""
        if not _try_lock(self.fd, WRITING):
            return False
        try:
            words = self._words
            end, places = words[HEAD], []
            for _, size in batch:
                left = self.capacity - end % self.capacity
                taken = _taken_by(size)
                places.append(end if taken <= left else end + left)  # records do not wrap
                end = places[-1] + taken
            if end + spare > self._limit:
                self._limit = self._tail() + self.capacity
                if end + spare > self._limit:
                    return False
            before = words[HEAD]
            for (parts, size), start in zip(batch, places, strict=True):
                if start > before:
                    self._write_header(before, FILLER | (start - before - ALIGN), 0)
                self._write_header(start, size, self._copy(parts, size, start))
                before = start + _taken_by(size)
            words[WRITTEN] += len(batch)
            self._barrier()
            words[HEAD] = end  # the commit
            return True
        finally:
            _unlock(self.fd, WRITING)

    def _copy(self, parts: list[memoryview], size: int, position: int) -> int:
        """Copies the parts into the record at the position and returns their checksum."""
        ring, at = self._bytes, self._at(position) + ALIGN
        if size <= CHUNK:
            start = at
            for part in parts:
                end = at + len(part)
                ring[at:end] = part
                at = end
            return _digest(ring[start:at], position)
        checksum = xxhash.xxh3_64(seed=position)
        for part in parts:
            for start in range(0, len(part), CHUNK):
                piece = part[start : start + CHUNK]
                checksum.update(piece)
                ring[at : at + len(piece)] = piece
                at += len(piece)
        return checksum.intdigest()

    def _write_header(self, position: int, size: int, checksum: int) -> None:
        check = _digest(CHECKED.pack(position, size, checksum), self._key)
        HEADER.pack_into(self._bytes, self._at(position), position, size, checksum, check)

    # -- reading

    def get(self, timeout: float = 600.0) -> Record:
        """The oldest record that nobody has. Raises RingTimeout if there is none in so many seconds, RecordDamaged for one that
        was changed after it was written. While it is the only reader it takes a few small records ahead: they stay with it when
        another joins, and go to others if it dies."""
        position, size, checksum, place, redelivered = self._ahead.popleft() if self._ahead else self._next(timeout)
        start = self._at(position) + ALIGN
        data = memoryview(self._map)[start : start + size].toreadonly()  # a buffer of its own: `_release` counts them
        self._records += 1
        record = Record(data, position, redelivered, self, place, self._owner)
        if _digest(data, position) != checksum:
            record.release()
            raise self._damaged(position, time.monotonic() + 60)
        return record

    def _next(self, timeout: float) -> Taken:
        now = time.monotonic()
        deadline = now + timeout
        if not self._owner:
            self._register(deadline)
        return self._take(now, deadline) or _wait(
            lambda: self._take(time.monotonic(), deadline), deadline, lambda: f"no record in {timeout} s; {self.state()}"
        )

    def _take(self, now: float, deadline: float) -> Taken | None:
        """Makes a record this reader's, and perhaps some more that go to `_ahead`. None if there is none."""
        words = self._words
        check = now >= self._next_check
        if words[CURSOR] == words[HEAD] and not check:
            return None  # nothing new, and no lock for nothing
        self._lock(READING, deadline)
        try:
            return (check and self._take_abandoned(now)) or self._take_unread()
        finally:
            _unlock(self.fd, READING)

    def _take_unread(self) -> Taken | None:
        """Takes what is at the cursor, going over what fills the end of the ring. Under the readers' lock."""
        words = self._words
        position, head = words[CURSOR], words[HEAD]
        self._barrier()  # what was written before this head is visible behind it
        places = self._free_places(AHEAD if words[NEXT_OWNER] == self._alone else 1)
        taken = self._ahead
        while position != head and len(taken) < len(places):
            header = self._read_header(position)
            if header is None:
                if taken:
                    break  # these first
                words[CURSOR] = self._next_header(position, head)
                raise self._damaged(position)
            size, checksum = header
            if not size & FILLER:
                if taken and size > PAGE:
                    break
                place = places[len(taken)]
                words[OWNERS + place] = self._owner
                words[HELD + place] = position + 1
                taken.append((position, size, checksum, place, False))
            position += _taken_by(size & ~FILLER)
        words[TAKEN] += len(taken)
        self._barrier()  # a writer that sees the cursor move sees that the records are held
        words[CURSOR] = position
        return taken.popleft() if taken else None

    def _take_abandoned(self, now: float) -> Taken | None:
        """Takes over the oldest record of a reader that is dead. Under the readers' lock."""
        words = self._words
        self._next_check = now + CHECK_SECONDS
        alone = not _is_locked(self.fd, ALIVE, QUEUE - ALIVE)
        self._alone = words[NEXT_OWNER] if alone else 0
        alive = {self._owner}
        for held, place in sorted(self._held()):
            owner = words[OWNERS + place]
            if owner in alive or _is_locked(self.fd, ALIVE + owner, 1):
                alive.add(owner)
            elif words[HELD + place] == held:  # it did not cross it out before it left
                self._next_check = now  # there may be more
                words[OWNERS + place] = self._owner
                words[REDELIVERED] += 1
                header = self._read_header(held - 1)
                if header is None:
                    words[HELD + place] = 0
                    raise self._damaged(held - 1)
                return (held - 1, *header, place, True)
        return None

    def _damaged(self, position: int, deadline: float | None = None) -> RecordDamaged:
        """Counts a damaged record; under the readers' lock, which it takes if there is a deadline."""
        with self._locked(READING, deadline) if deadline else contextlib.nullcontext():
            self._words[DAMAGED] += 1
        return RecordDamaged(f"the ring's record at {position} is damaged: a checksum does not fit; {self.state()}")

    def _free_places(self, count: int) -> list[int]:
        """Up to so many free lines of the table. Under the readers' lock."""
        words = self._words
        if count == 1 and not words[HELD + self._place]:
            return [self._place]
        used = words[USED]
        column = words[HELD : HELD + min(used + count, MAX_HELD)].tolist()
        places = [place for place, held in enumerate(column) if not held][:count]
        if places:
            words[USED] = max(used, places[-1] + 1)
            self._place = places[0]
        return places

    def _release(self, place: int, owner: int) -> None:
        if sys.getrefcount(self._map) >= self._references + self._records:
            raise BufferError("a slice of a record's data, or an array over it, is still in use")
        self._records -= 1
        if owner == self._owner:  # else the ring was closed, or this is a forked child: it is not ours to give back
            self._barrier()  # what was read of the record was read before
            self._words[HELD + place] = 0

    def _register(self, deadline: float) -> None:
        """Draws a number for this reader; a lock on its byte says that it lives."""
        with self._locked(READING, deadline):
            owner = self._words[NEXT_OWNER]
            self._words[NEXT_OWNER] = owner + 1
        _try_lock(self.fd, ALIVE + owner)
        self._owner = owner

    def _next_header(self, position: int, head: int) -> int:
        """The position of the next record behind a damaged header: whatever is in between is lost."""
        position += ALIGN
        while position < head and self._read_header(position) is None:
            position += ALIGN
        return position

    # -- what both sides use

    def _at(self, position: int) -> int:
        return CONTROL + position % self.capacity

    def _read_header(self, position: int) -> tuple[int, int] | None:
        """(size, checksum) of the record at the position; None if none is there."""
        at = self._at(position)
        where, size, checksum, check = HEADER.unpack_from(self._bytes, at)
        if where != position or check != _digest(self._bytes[at : at + CHECKED.size], self._key):
            return None
        return size, checksum

    def _held(self) -> list[tuple[int, int]]:
        """(position + 1, place in the table) of the records that readers hold."""
        column = self._words[HELD : HELD + self._words[USED]].tolist()
        return [(position, place) for place, position in enumerate(column) if position]

    def _tail(self) -> int:
        """Where the space in use begins. Needs no lock: a record is in the table before the cursor passes it, and stays there
        until it is released, so that looking at the cursor first never gives a tail too far."""
        cursor = self._words[CURSOR]
        self._barrier()
        tail = min(cursor, min(self._held(), default=(cursor + 1, 0))[0] - 1)
        self._barrier()  # what is written from here on comes after what their readers read
        return tail

    def _barrier(self) -> None:
        """All loads and stores above happen before all below, as others see them. A lock orders memory by POSIX: nothing from
        above moves below its release, nothing from below moves above its taking, and these two do not change places."""
        release, acquire = self._unlock_and_lock
        release()
        acquire()

    def _lock(self, byte: int, deadline: float) -> None:
        """Takes a mutex: a lock on one byte of the file, which the kernel drops if the holder dies."""
        if not _try_lock(self.fd, byte):
            _wait(lambda: _try_lock(self.fd, byte), deadline, lambda: f"{LOCK_HOLDERS[byte]} kept its lock")

    @contextlib.contextmanager
    def _locked(self, byte: int, deadline: float):
        self._lock(byte, deadline)
        try:
            yield
        finally:
            _unlock(self.fd, byte)


def _try_lock(fd: int, byte: int) -> bool:
    try:
        fcntl(fd, F_OFD_SETLK, _range(F_WRLCK, byte, 1))
    except BlockingIOError:
        return False
    return True


def _unlock(fd: int, byte: int) -> None:
    fcntl(fd, F_OFD_SETLK, _range(F_UNLCK, byte, 1))


def _is_locked(fd: int, byte: int, count: int) -> bool:
    """Whether another holds a lock on any of the bytes; a count of 0 means all from there on."""
    answer = fcntl(fd, F_OFD_GETLK, _range(F_WRLCK, byte, count))
    return answer[:2] != _range(F_UNLCK, byte, count)[:2]


@functools.lru_cache(maxsize=64)
def _range(kind: int, byte: int, count: int) -> bytes:
    """struct flock of some bytes, for locks that belong to the open file (OFD): each end of the ring has its own."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, count, 0)


def _reopen(fd: int) -> int:
    """Another open file of the same memory, with locks of its own."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


_rings: "weakref.WeakSet[Ring]" = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child: lets go of the parent's open files, or the locks of a parent that dies would live on in the child."""
    for ring in list(_rings):
        try:
            fresh = _reopen(ring.fd)
            os.dup2(fresh, ring.fd, inheritable=False)
            os.close(fresh)
            ring._start()
        except OSError:
            os.close(ring.fd)
            ring.fd = -1


os.register_at_fork(after_in_child=_after_fork)


def _flat(part) -> memoryview:
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")  # a view without bytes cannot be cast


def _taken_by(size: int) -> int:
    """Bytes of the ring that a record with so many bytes of data takes."""
    return ALIGN - (-size // ALIGN) * ALIGN


def _wait(ready: Callable, deadline: float, otherwise: Callable[[], str]):
    """Calls `ready` until it returns something (neither None nor False), and returns that: at once, then after naps of 20
    microseconds growing to 2 milliseconds, which is about 1% of a core. Raises RingTimeout at the deadline."""
    nap = 20e-6
    while (result := ready()) is None or result is False:
        if time.monotonic() > deadline:
            raise RingTimeout(otherwise())
        time.sleep(nap)
        nap = min(2 * nap, 2e-3)
    return result

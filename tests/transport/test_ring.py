"""The ring, compared with a model and with real processes that are killed. Every child has an alarm, so that nothing hangs."""

import collections
import contextlib
import fcntl
import mmap
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.transport import ring as ring_module
from rl.transport.ring import RecordDamaged, RecordTooLarge, Ring, RingTimeout

LIMIT = 60  # seconds that any child may live
NOISE = random.Random(0).randbytes(1 << 20)


@pytest.fixture
def ring():
    made = Ring.create(1 << 20)
    yield made
    made.close()


def start(run, *arguments) -> int:
    """Runs the function in a forked child and returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's own would only raise
        signal.alarm(LIMIT)
        run(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def finish(*pids: int) -> None:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * len(codes), codes


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it ended before it was killed"


def pipe_byte(fd: int) -> bytes:
    """Wait for a byte from a child."""
    assert select.select([fd], [], [], LIMIT)[0], "a child did not get there"
    return os.read(fd, 1)


def in_a_small_process(test):
    """For tests that fork hundreds of times: each fork of pytest, with torch loaded, takes many times as long."""

    def run() -> None:
        command = [sys.executable, "-c", f"import test_ring; test_ring.{test.__name__}.plain()"]
        environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{Path(ring_module.__file__).parents[2]}"}
        done = subprocess.run(command, env=environment, timeout=4 * LIMIT, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr

    run.plain, run.__doc__ = test, test.__doc__
    return run


def body(writer: int, number: int, size: int) -> bytes:
    """Return a record's content: its writer, its number, and bytes derived from these."""
    head = struct.pack("<QQ", writer, number)
    at = (writer * 31 + number * 7919) % (len(NOISE) - size)
    return head + NOISE[at : at + size]


def parse(data: bytes) -> tuple[int, int]:
    writer, number = struct.unpack_from("<QQ", data)
    assert data == body(writer, number, len(data) - 16), f"record {number} of writer {writer} is torn"
    return writer, number


def drain(ring: Ring, timeout: float = 0.0) -> list[bytes]:
    """Return all records. Stop when none arrives for `timeout` seconds."""
    out = []
    while True:
        try:
            out.append(ring.get(timeout))
        except RingTimeout:
            return out


# ------------------------------------------------------------------------------------------------------------ one process


@settings(max_examples=120)
@given(st.data())
def test_it_does_what_a_queue_does(data):
    """Compares random puts and gets, and readers that leave, with a deque. The ring is small, so that it wraps all the time."""
    writers = [Ring.create(8192)]
    writers.append(Ring.attach(writers[0].address))
    reader, unread, number = Ring.attach(writers[0].address), collections.deque(), 0
    for action, size, which in data.draw(
        st.lists(st.tuples(st.sampled_from("pppggx"), st.integers(0, 4032), st.integers(0, 1)), max_size=60)
    ):
        if action == "p":
            content = NOISE[number : number + size]
            cut, number = size // 3, number + 1
            used = round(reader.occupancy * reader.capacity)
            try:
                writers[which].put(content[:cut], np.frombuffer(content[cut:], np.uint8), timeout=0)
                unread.append(content)
            except RingTimeout:
                assert used + 2 * (size + 128) > reader.capacity, "full, but there was room"
        elif action == "x":
            reader.close()
            reader = Ring.attach(writers[0].address)
        elif not unread:
            with pytest.raises(RingTimeout):
                reader.get(timeout=0)
        else:
            assert reader.get(timeout=0) == unread.popleft()
    assert drain(reader) == list(unread)
    assert reader.occupancy == 0
    for end in (*writers, reader):
        end.close()


def test_parts_of_any_kind(ring):
    ring.put(b"ab", np.arange(6, dtype=np.float32).reshape(2, 3), np.empty((0, 4)), bytearray(b"c"), memoryview(b""))
    assert ring.get() == b"ab" + np.arange(6, dtype=np.float32).tobytes() + b"c"
    ring.put()
    assert ring.get() == b""


def test_a_record_too_large_is_refused_and_the_largest_fits_wherever_the_head_is(ring):
    with pytest.raises(RecordTooLarge, match=f"{ring.max_record:,}"):
        ring.put(bytes(ring.max_record), b"x")
    assert drain(ring) == [], "nothing was written"
    for size in (ring.max_record, 100, ring.max_record - 1000, ring.max_record, 300_000, ring.max_record):
        ring.put(NOISE[:size], timeout=0)
        assert drain(ring) == [NOISE[:size]]


def test_full_and_empty(ring):
    with pytest.raises(RingTimeout, match=r"no record in 0.05 s"):
        ring.get(timeout=0.05)
    ring.put(NOISE[: ring.max_record])
    ring.put(NOISE[: ring.max_record])
    assert ring.occupancy == 1
    with pytest.raises(RingTimeout, match=r"no room for 128 bytes in 0.05 s; 100% are in use"):
        ring.put(b"x", timeout=0.05)
    with pytest.raises(RingTimeout, match="no room for 64 bytes"):
        ring.put(timeout=0)
    assert len(drain(ring)) == 2
    assert ring.occupancy == 0
    ring.put(b"x", timeout=0)


def test_no_more_memory_is_touched_than_was_on_its_way_at_once():
    """Ten times the ring's capacity passes through it, as records that are put and taken in turns."""
    ring, chance, passed = Ring.create(64 << 20), random.Random(3), 0
    while passed < 10 * ring.capacity:
        turn = [NOISE[: chance.randrange(1 << 19)] for _ in range(chance.randrange(1, 4))]
        for content in turn:
            ring.put(content, timeout=0)
        assert drain(ring) == turn
        passed += sum(map(len, turn))
    assert os.fstat(ring.fd).st_blocks * 512 <= 3 << 19 | 1 << 14, "pages of the memfd that are in memory"
    ring.close()


def test_two_thousand_damaged_records_are_refused():
    """A byte changes in a header, a filler's header or the data: none is handed out as if it were whole."""
    chance, fillers = random.Random(1), 0
    for number in range(2000):
        ring = Ring.create(8192)
        for content in (NOISE[: chance.randrange(3800)], NOISE[: chance.randrange(3800)], b"in front"):
            ring.put(content, timeout=0)
        for _ in range(2):
            ring.get(timeout=0)
        before, size = ring._words[ring_module.HEAD], chance.choice((1, 40, 700, 3900))
        ring.put(body(1, number, size), timeout=0)
        begin = ring._words[ring_module.HEAD] - ring_module._footprint(size + 16)
        places = [ring._at(begin) + chance.randrange(16), ring._at(begin) + 64 + chance.randrange(size + 16)]
        if before != begin:
            fillers += 1
            places.append(ring._at(before) + chance.randrange(16))
        assert ring.get(timeout=0) == b"in front"
        ring._bytes[chance.choice(places)] ^= chance.randrange(1, 256)
        with pytest.raises(RecordDamaged):
            ring.get(timeout=0)
        ring.close()
    assert fillers > 100


def test_two_rings_have_nothing_in_common_and_belong_to_their_owner(ring):
    other = Ring.create(1 << 16)
    ring.put(b"mine")
    assert drain(Ring.attach(other.address)) == []
    assert os.fstat(ring.fd).st_mode & 0o777 == 0o600
    assert os.fstat(ring.fd).st_nlink == 0, "it has a name"
    assert os.fstat(ring.fd).st_ino != os.fstat(other.fd).st_ino
    address = other.address
    other.close()
    other.close()
    with pytest.raises(OSError):
        Ring.attach(address)


# ----------------------------------------------------------------------------------------------------- several processes


def test_records_of_several_writers_arrive_once_and_in_each_writers_order(ring):
    def write(writer: int, largest: int) -> None:
        end, chance = Ring.attach(ring.address), random.Random(writer)
        for number in range(2000):
            end.put(body(writer, number, chance.randrange(largest)), timeout=LIMIT)

    writers = [start(write, i, 3000 if i else 100_000) for i in range(3)]
    seen = collections.defaultdict(list)
    for _ in range(6000):
        writer, number = parse(ring.get(timeout=LIMIT))
        seen[writer].append(number)
    finish(*writers)
    assert seen == {writer: list(range(2000)) for writer in range(3)}
    assert ring.occupancy == 0


# ------------------------------------------------------------------------------------------------------------------ kills


def test_a_writer_killed_with_the_lock_in_its_hand_holds_nobody_up(ring):
    seen, write = os.pipe()

    def hold() -> None:
        fcntl.flock(Ring.attach(ring.address).fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(write, b"!")
        time.sleep(LIMIT)

    pid = start(hold)
    pipe_byte(seen)
    with pytest.raises(RingTimeout):
        ring.put(b"x", timeout=0.05)
    kill(pid)
    ring.put(b"x", timeout=5)
    assert drain(ring) == [b"x"]


@contextlib.contextmanager
def killed_at_step(step: int):
    """Kills this process before the given bytecode instruction of what runs inside."""
    left = step

    def trace(frame, event, _):
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    yield
    sys.settrace(None)


def kill_at_every_step(ring: Ring, run, check) -> int:
    """Runs run(its own end of the ring) in children killed before its first, second, third ... instruction, until one comes to
    its end. check(whether it did) after each."""
    for step in range(10_000):

        def child(step=step) -> None:
            end = Ring.attach(ring.address)
            with killed_at_step(step):
                run(end)

        pid = start(child)
        _, status = os.waitpid(pid, 0)
        check(finished := status == 0)
        if finished:
            return step
        assert status == signal.SIGKILL
    raise AssertionError("it never came to its end")


def kill_a_writer_at_every_instruction(unread: list[bytes]) -> None:
    """Each time from the same state: two records have been taken, and these are still in the ring."""
    ring, content, outcomes = Ring.create(8192), NOISE[:3000], set()

    def prepare() -> None:
        for record in [NOISE[:1000], NOISE[:3000], *unread]:
            ring.put(record, timeout=0)  # nothing that the dead one held is in the way
        for _ in range(2):
            ring.get(timeout=0)

    def check(finished: bool) -> None:
        found = drain(ring)
        assert found in (unread, [*unread, content]) and (len(found) > len(unread) or not finished)
        outcomes.add(len(found) - len(unread))
        assert ring.occupancy == 0
        prepare()

    prepare()
    assert kill_at_every_step(ring, lambda end: end.put(content, timeout=1), check) > 100
    assert outcomes == {0, 1}


@pytest.mark.slow
@in_a_small_process
def test_a_writer_killed_at_every_instruction_has_written_all_or_nothing():
    """Just before a wrap, so that a filler is written too, and as it begins at the start again."""
    for unread in ([NOISE[5:2005]], []):
        kill_a_writer_at_every_instruction(unread)


@pytest.mark.slow
@in_a_small_process
def test_a_reader_killed_at_every_instruction_loses_nothing():
    """A reader is killed until it has taken two of three records, the second one behind a filler: the next one gets what the
    dead one had not taken, and a record that is freed was read whole."""
    ring, contents, handled = Ring.create(16384), [NOISE[i : 3000 + i] for i in range(3)], mmap.mmap(-1, 1)
    outcomes = set()

    def run(end: Ring) -> None:
        for content in contents[:2]:
            assert end.get(timeout=1) == content
            handled[0] += 1

    def check(_) -> None:
        found = drain(ring)
        assert found == contents[len(contents) - len(found) :], "in order, up to the last"
        assert handled[0] <= len(contents) - len(found) <= handled[0] + 1
        assert ring.occupancy == 0
        outcomes.add(len(found))
        handled[0] = 0
        prepare()

    def prepare() -> None:
        for content in [NOISE[:3000]] * 4 + contents[:1]:
            ring.put(content, timeout=0)
        for _ in range(4):
            ring.get(timeout=0)
        for content in contents[1:]:
            ring.put(content, timeout=0)
        assert ring.occupancy > 3 * ring_module._footprint(3000) / ring.capacity, "there is a filler"

    prepare()
    assert kill_at_every_step(ring, run, check) > 100
    assert outcomes == {1, 2, 3}

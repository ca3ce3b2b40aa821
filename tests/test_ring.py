"""The ring beside a model of it, and with real processes that are killed. Every child has an alarm, so that nothing hangs."""

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

from rl import ring as ring_module
from rl.ring import RecordDamaged, RecordTooLarge, Ring, RingTimeout

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


@contextlib.contextmanager
def children(*starts):
    """Children that are killed in the end."""
    pids = [start(*each) for each in starts]
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                kill(pid)


def pipe_byte(fd: int) -> bytes:
    """Waits for a byte of a child's."""
    assert select.select([fd], [], [], LIMIT)[0], "a child did not get there"
    return os.read(fd, 1)


def join(address: str) -> Ring:
    """A reader that the others know of before there are records, so that nobody takes more than one at a time."""
    ring = Ring.attach(address)
    ring._register(time.monotonic() + LIMIT)
    return ring


def in_a_small_process(test):
    """For tests that fork hundreds of times: each fork of pytest, with torch loaded, takes many times as long."""

    def run() -> None:
        root = Path(__file__).resolve().parent
        command = [sys.executable, "-c", f"import test_ring; test_ring.{test.__name__}.plain()"]
        environment = os.environ | {"PYTHONPATH": f"{root}:{root.parent}"}
        done = subprocess.run(command, env=environment, timeout=4 * LIMIT, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr

    run.plain, run.__doc__ = test, test.__doc__
    return run


def body(writer: int, number: int, size: int) -> bytes:
    """What a record says: who wrote it, its number, and bytes that follow from these."""
    head = struct.pack("<QQ", writer, number)
    at = (writer * 31 + number * 7919) % (len(NOISE) - size)
    return head + NOISE[at : at + size]


def parse(data: memoryview) -> tuple[int, int]:
    writer, number = struct.unpack_from("<QQ", data)
    assert data == body(writer, number, len(data) - 16), f"record {number} of writer {writer} is torn"
    return writer, number


def drain(ring: Ring, timeout: float = 0.0) -> list[bytes]:
    """Takes what there is, until nothing comes for so many seconds."""
    out = []
    while True:
        try:
            with ring.get(timeout) as record:
                out.append(bytes(record.data))
        except RingTimeout:
            return out


# ------------------------------------------------------------------------------------------------------------ one process


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_it_does_what_a_queue_does(data):
    """Random puts, gets, releases in any order and readers that leave, beside a deque. Small, so that it wraps all the time."""
    writer = Ring.create(8192)
    readers = [join(writer.address), join(writer.address)]
    unread, abandoned, held, number = collections.deque(), {}, {}, 0
    for step in data.draw(
        st.lists(st.tuples(st.sampled_from("ppmggrrx"), st.integers(0, 4032), st.integers(0, 1)), max_size=60)
    ):
        action, size, which = step
        reader = readers[which]
        if action == "p":
            content = NOISE[number : number + size]
            cut, number = size // 3, number + 1
            used = round(writer.occupancy * writer.capacity)
            try:
                writer.put(content[:cut], np.frombuffer(content[cut:], np.uint8), timeout=0)
                unread.append(content)
            except RingTimeout:
                assert used + 2 * (size + 128) > writer.capacity, "full, but there was room"
        elif action == "m":  # several small ones in one commit
            contents = [NOISE[number + i : number + i + size // 16] for i in range(3)]
            number += 3
            with contextlib.suppress(RingTimeout):
                writer.put_many(contents, timeout=0)
                unread.extend(contents)
        elif action == "g":
            reader._next_check = 0.0
            try:
                record = reader.get(timeout=0)
            except RingTimeout:
                assert not unread and not abandoned
                continue
            expected = abandoned.pop(record.position) if record.redelivered else unread.popleft()
            assert record.data == expected
            held[record.position] = (which, record, expected)
        elif action == "r" and held:
            _, record, expected = held.pop(sorted(held)[size % len(held)])
            assert record.data == expected, "a held record changed"
            record.release()
        elif action == "x":  # it leaves with all that it holds
            reader.close()
            readers[which] = join(writer.address)
            mine = [position for position, (owner, *_) in held.items() if owner == which]
            abandoned |= {position: held.pop(position)[2] for position in mine}
    for _, record, _ in held.values():
        record.release()
    readers[0]._next_check = 0.0
    left = drain(readers[0], 0.3 if abandoned else 0)
    assert sorted(left) == sorted([*unread, *abandoned.values()])
    assert writer.occupancy == 0
    for end in (writer, *readers):
        end.close()


def test_parts_of_any_kind(ring):
    ring.put(b"ab", np.arange(6, dtype=np.float32).reshape(2, 3), np.empty((0, 4)), bytearray(b"c"), memoryview(b""))
    with ring.get() as record:
        assert record.data == b"ab" + np.arange(6, dtype=np.float32).tobytes() + b"c"
        assert record.data.readonly
    ring.put()
    with ring.get() as record:
        assert len(record.data) == 0


def test_a_record_too_large_is_refused_and_the_largest_fits_wherever_the_head_is(ring):
    with pytest.raises(RecordTooLarge, match=f"{ring.max_record:,}"):
        ring.put(bytes(ring.max_record), b"x")
    with pytest.raises(RecordTooLarge, match=f"{ring.max_record:,}"):
        ring.put_many([b"x", bytes(ring.max_record + 1)])
    assert drain(ring) == [], "nothing was written"
    ring.put_many(NOISE[i : i + 50_000] for i in range(20))
    assert drain(ring) == [NOISE[i : i + 50_000] for i in range(20)]
    for size in (ring.max_record, 100, ring.max_record - 1000, ring.max_record, 300_000, ring.max_record):
        ring.put(NOISE[:size], timeout=0)
        assert drain(ring) == [NOISE[:size]]


def test_full_and_empty(ring):
    with pytest.raises(RingTimeout, match=r"no record in 0.05 s; 0% of 1 MiB"):
        ring.get(timeout=0.05)
    ring.put(NOISE[: ring.max_record])
    ring.put(NOISE[: ring.max_record])
    assert ring.occupancy == 1
    with pytest.raises(RingTimeout, match=r"no room for 128 bytes in 0.05 s; 100% of 1 MiB"):
        ring.put(b"x", timeout=0.05)
    assert ring.counts == {"written": 2, "released": 0, "redelivered": 0, "damaged": 0}
    assert len(drain(ring)) == 2
    assert ring.counts["released"] == 2 and ring.occupancy == 0
    ring.put(b"x", timeout=0)


def test_a_held_record_keeps_its_space_and_its_bytes(ring):
    ring.put(NOISE[:400_000])
    held = ring.get()
    written = 0
    with pytest.raises(RingTimeout):
        for _ in range(20):
            ring.put(NOISE[7:300_007], timeout=0)
            written += 1
            drain(ring)
    assert written and held.data == NOISE[:400_000]
    assert ring.counts["released"] == written
    held.release()
    held.release()  # twice is as good as once
    ring.put(NOISE[7:300_007], timeout=0)


@pytest.mark.parametrize("look", [lambda data: data[5:], np.asarray, lambda data: np.frombuffer(data[8:], np.float32, 4)])
def test_a_record_is_not_given_back_while_something_looks_at_it(ring, look):
    ring.put(NOISE[:4096])
    ring.put(b"another")
    with ring.get() as record, ring.get() as other:
        view = look(record.data)
        with pytest.raises(BufferError):
            record.release()
        assert ring.counts["released"] == 0
        other.release()
        del view
    assert ring.counts["released"] == 2
    ring.put(bytes(100))
    with pytest.raises(ZeroDivisionError), ring.get() as record:
        view = look(record.data)
        raise ZeroDivisionError("the error of the block comes through")
    del view
    record.release()
    assert ring.occupancy == 0


def test_the_only_reader_takes_some_small_records_ahead(ring):
    """They stay with it when another one joins, and go to that one when it leaves."""
    numbers = [bytes([number]) for number in range(40)]
    for number in numbers:
        ring.put(number)
    ring.put(NOISE[:10_000])
    first, second = Ring.attach(ring.address), Ring.attach(ring.address)
    held = first.get()
    assert held.data == numbers[0] and ring.counts["released"] == 0
    assert drain(second) == [*numbers[ring_module.AHEAD :], NOISE[:10_000]]
    with first.get() as record:
        assert record.data == numbers[1]
    first.close()
    assert drain(second, 0.3) == [numbers[0], *numbers[2 : ring_module.AHEAD]]
    assert ring.occupancy == 0 and ring.counts["redelivered"] == ring_module.AHEAD - 1


def test_more_held_records_than_the_table_takes(ring):
    for _ in range(ring_module.MAX_HELD + 1):
        ring.put(b"")
    records = [ring.get() for _ in range(ring_module.MAX_HELD)]
    with pytest.raises(RingTimeout, match=f"{ring_module.MAX_HELD} records held"):
        ring.get(timeout=0.01)
    for record in records:
        record.release()
    ring.get(timeout=0).release()
    assert ring.occupancy == 0


def test_ten_thousand_damaged_records_are_refused_and_all_others_delivered():
    """Random bytes change in headers, fillers and data: damaged records are never handed out, all others are."""
    chance, ring, damaged, refused = random.Random(1), Ring.create(1 << 18), 0, 0
    while damaged < 11_000:
        sizes = [chance.choice((0, 1, 40, 700, 9000)) for _ in range(8)]
        intact, spoilt = [], 0
        for i, size in enumerate(sizes):
            before = ring._words[ring_module.HEAD]
            ring.put(body(damaged, i, size), timeout=0)
            begin = ring._words[ring_module.HEAD] - ring_module._taken_by(size + 16)
            if before != begin and chance.random() < 0.5:
                ring._bytes[ring._at(before) + chance.randrange(24)] ^= chance.randrange(1, 256)
            if chance.random() < 0.3:
                intact.append((damaged, i))
                continue
            spoilt += 1
            for _ in range(chance.choice((1, 1, 1, 5))):
                at = ring._at(begin) + (chance.randrange(32) if chance.random() < 0.4 else 64 + chance.randrange(size + 16))
                old = ring._bytes[at]
                ring._bytes[at] = (old + chance.randrange(1, 128)) % 256
        seen = []
        while ring.occupancy:
            try:
                with ring.get(timeout=0) as record:
                    seen.append(parse(record.data))
            except RecordDamaged:
                refused += 1
        assert seen == intact
        damaged += spoilt
    assert ring.counts["damaged"] == refused
    ring.put(b"it goes on")
    assert drain(ring) == [b"it goes on"]
    ring.close()


def test_damage_to_a_record_whose_reader_died(ring):
    assert drain(ring) == []  # now the other is not the only reader
    ring.put(b"first")
    ring.put(b"second")
    reader = Ring.attach(ring.address)
    position = reader.get().position
    reader.close()
    ring._bytes[ring._at(position)] ^= 1
    ring._next_check = 0.0
    with pytest.raises(RecordDamaged):
        ring.get(timeout=1)
    assert drain(ring) == [b"second"]
    assert ring.occupancy == 0 and ring.counts["redelivered"] == 1


def test_two_rings_have_nothing_in_common_and_belong_to_their_owner(ring):
    other = Ring.create(1 << 16)
    ring.put(b"mine")
    with pytest.raises(RingTimeout):
        Ring.attach(other.address).get(timeout=0)
    assert os.fstat(ring.fd).st_mode & 0o777 == 0o600
    assert os.fstat(ring.fd).st_nlink == 0, "it has a name"
    assert os.readlink(f"/proc/self/fd/{ring.fd}") != os.readlink(f"/proc/self/fd/{other.fd}")
    address = other.address
    other.close()
    other.close()
    with pytest.raises(OSError):
        Ring.attach(address)
    with pytest.raises(OSError, match="no longer this ring"):
        Ring.attach(ring.address.partition("#")[0] + "#0000000000000000")


# ----------------------------------------------------------------------------------------------------- several processes


def write_many(address: str, writer: int, count: int, largest: int) -> None:
    ring, chance = Ring.attach(address), random.Random(writer)
    for number in range(count):
        ring.put(body(writer, number, chance.randrange(largest)), timeout=LIMIT)


def read_many(address: str, log: int) -> None:
    ring = Ring.attach(address)
    while True:
        with ring.get(timeout=LIMIT) as record:
            if len(record.data) == 1:
                return
            os.write(log, struct.pack("<QQ", *parse(record.data)))


def test_several_writers_and_readers_get_every_record_once(ring, tmp_path):
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    writers = [start(write_many, ring.address, i, 2000, 3000 if i else 100_000) for i in range(3)]
    readers = [start(read_many, ring.address, log) for _ in range(3)]
    finish(*writers)
    for _ in readers:
        ring.put(b"!")
    finish(*readers)
    seen = list(struct.iter_unpack("<QQ", (tmp_path / "log").read_bytes()))
    os.close(log)
    assert sorted(seen) == [(writer, number) for writer in range(3) for number in range(2000)]
    assert ring.counts == {"written": 6003, "released": 6003, "redelivered": 0, "damaged": 0} and ring.occupancy == 0


def test_soak_of_a_million_records():
    ring, count = Ring.create(8 << 20), 1_000_000

    def write() -> None:
        end = Ring.attach(ring.address)
        for number in range(count):
            end.put(NOISE[number & 0xFFFF : (number & 0xFFFF) + 8 + (number & 127)], number.to_bytes(8, "little"))

    writer = start(write)
    for number in range(count):
        with ring.get(timeout=LIMIT) as record:
            expected = NOISE[number & 0xFFFF : (number & 0xFFFF) + 8 + (number & 127)]
            assert record.data == expected + number.to_bytes(8, "little")
    finish(writer)
    assert ring.counts == {"written": count, "released": count, "redelivered": 0, "damaged": 0} and ring.occupancy == 0
    ring.close()


def test_a_wait_does_not_burn_a_core(ring):
    before = time.process_time()
    with pytest.raises(RingTimeout):
        ring.get(timeout=1)
    ring.put(NOISE[: ring.max_record])
    ring.put(NOISE[: ring.max_record])
    with pytest.raises(RingTimeout):
        ring.put(b"x", timeout=1)
    assert time.process_time() - before < 0.4


@pytest.mark.parametrize("size", [100, 20_000])
def test_a_writer_that_waits_is_not_overtaken_for_ever(size):
    """Two writers that try all the time and one that asks for half of the ring, while a slow reader keeps it full."""
    ring = Ring.create(1 << 16)

    def write(writer: int) -> None:
        end = Ring.attach(ring.address)
        while True:
            with contextlib.suppress(RingTimeout):
                end.put(body(writer, 0, size), timeout=0)

    def read() -> None:
        end = Ring.attach(ring.address)
        while True:
            end.get(timeout=LIMIT).release()
            time.sleep(1e-4)

    with children((write, 0), (write, 1), (read,)):
        for number in range(5):
            ring.put(body(9, number, ring.max_record - 16), timeout=LIMIT / 3)
    ring.close()


def test_those_who_wait_for_room_are_served_in_order(ring):
    for _ in range(2):
        ring.put(NOISE[: ring.max_record])

    def write(number: int) -> None:
        Ring.attach(ring.address).put(bytes([number]) * (5000 if number else ring.max_record), timeout=LIMIT)

    pids = []
    for number in range(6):
        pids.append(start(write, number))
        while ring._words[ring_module.NEXT_TICKET] <= number:
            time.sleep(0.001)
    time.sleep(0.05)  # by now their naps are long
    assert [record[:1] for record in drain(ring, 1.0)[2:]] == [bytes([number]) for number in range(6)]
    finish(*pids)


def test_puts_that_do_not_wait_come_through_behind_a_dead_waiter(ring):
    """The words in memory may say that somebody queues; the locks know better."""
    ring.put(NOISE[: ring.max_record])
    ring.put(NOISE[: ring.max_record])
    pid = start(Ring.attach(ring.address).put, b"it waits")
    while not ring._words[ring_module.WAITING]:
        time.sleep(0.01)
    kill(pid)
    drain(ring)
    assert ring._words[ring_module.WAITING]
    ring.put(NOISE[: ring.max_record], timeout=0)
    assert not ring._words[ring_module.WAITING]


# ------------------------------------------------------------------------------------------------------------------ kills


def hold(address: str, pipe: int) -> None:
    record = Ring.attach(address).get()
    os.write(pipe, b"!")
    time.sleep(LIMIT)
    record.release()


def test_a_dead_readers_record_goes_to_another(ring):
    seen, write = os.pipe()
    assert drain(ring) == []  # now the other is not the only reader
    ring.put(NOISE[:1000])
    ring.put(b"next")
    with children((hold, ring.address, write)) as (pid,):
        assert pipe_byte(seen) == b"!"
        with ring.get(timeout=1) as record:
            assert record.data == b"next" and not record.redelivered, "the other one is alive"
        kill(pid)
        with ring.get(timeout=5) as record:
            assert record.data == NOISE[:1000] and record.redelivered
    assert ring.occupancy == 0 and ring.counts["redelivered"] == 1


def test_a_record_released_just_before_its_reader_ends_is_not_delivered_again(ring, monkeypatch):
    ring.put(b"once")
    reader = Ring.attach(ring.address)
    record = reader.get()

    def it_ends(*_) -> bool:
        record.release()
        return False

    monkeypatch.setattr(ring_module, "_is_locked", it_ends)
    assert drain(ring) == [] and ring.occupancy == 0


def test_locks_end_with_their_process_although_a_child_of_it_lives(ring):
    """A reader forks and is killed, while it holds a record and all three mutexes: its child keeps none of that."""
    seen, write = os.pipe()

    def parent() -> None:
        end = Ring.attach(ring.address)
        record = end.get()
        for byte in (ring_module.WRITING, ring_module.READING, ring_module.TURN):
            assert ring_module._try_lock(end.fd, byte)
        child = os.fork()
        if not child:
            record.release()  # in the child it means nothing
            os.write(write, b"!")
        time.sleep(10)
        os._exit(0)

    ring.put(b"held")
    pid = start(parent)
    pipe_byte(seen)
    kill(pid)
    with ring.get(timeout=5) as record:
        assert record.data == b"held" and record.redelivered
    ring.put(b"x", timeout=5)


def test_a_ring_is_used_on_both_sides_of_a_fork(ring):
    ring.put(b"a")
    mine = ring.get()
    ring.put(b"b")
    pid = start(lambda: drain(ring) == [b"b"] or os._exit(1))
    finish(pid)
    assert mine.data == b"a"
    mine.release()
    assert ring.occupancy == 0


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


def kill_at_every_step(run, check) -> int:
    """Runs a function in children killed before its first, second, third ... instruction until one comes to its end."""
    for step in range(10_000):

        def child(step=step) -> None:
            with killed_at_step(step):
                run()

        pid = start(child)
        _, status = os.waitpid(pid, 0)
        check(finished := status == 0)
        if finished:
            return step
        assert status == signal.SIGKILL
    raise AssertionError("it never came to its end")


@in_a_small_process
def test_a_writer_killed_at_every_instruction_has_written_all_or_nothing():
    """Each time from the same state, just before a wrap, so that a filler is written too; with one record, and with three in
    one commit."""
    writer_killed_at_every_instruction([NOISE[:3000]])
    writer_killed_at_every_instruction([NOISE[:500], NOISE[1:501], NOISE[2:502]])


def writer_killed_at_every_instruction(contents: list[bytes]) -> None:
    ring, outcomes = Ring.create(8192), set()

    def check(finished: bool) -> None:
        found = drain(ring)
        assert found in ([], contents) and (found or not finished)
        outcomes.add(len(found))
        assert ring.occupancy == 0
        while ring._words[ring_module.HEAD] % 8192 != 64 * 104:
            ring.put()
            drain(ring)

    check(False)
    write = (lambda: ring.put(*contents, timeout=1)) if len(contents) == 1 else (lambda: ring.put_many(contents, timeout=1))
    assert kill_at_every_step(write, check) > 100
    assert outcomes == {0, len(contents)}


@in_a_small_process
def test_a_reader_killed_at_every_instruction_loses_nothing():
    """A reader takes three records at once, and is killed until it has released two of them."""
    ring, contents, handled = Ring.create(16384), [NOISE[i : 3000 + i] for i in range(3)], mmap.mmap(-1, 1)
    outcomes = set()

    def run() -> None:
        for content in contents[:2]:
            with ring.get(timeout=1) as record:
                assert record.data == content
                handled[0] += 1

    def check(finished: bool) -> None:
        other = Ring.attach(ring.address)
        found = drain(other)
        assert set(found) <= set(contents) and len(found) <= 6
        assert set(found) >= set(contents[handled[0] :]), "lost before anyone had it"
        assert ring.occupancy == 0
        other.close()  # or the next one would not be alone
        outcomes.add(len(set(found)))
        handled[0] = 0
        for content in contents:
            ring.put(content)

    for content in contents:
        ring.put(content)
    assert kill_at_every_step(run, check) > 100
    assert outcomes == {1, 2, 3}


@in_a_small_process
def test_hundreds_of_random_kills():
    """Three writers and three readers, killed and replaced at random: what was committed is delivered, intact, and the space
    comes back."""
    chance, ring = random.Random(2), Ring.create(256 << 10)
    log, kills = os.memfd_create("log"), 600
    fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)  # one write at a time, whole
    returned = memoryview(mmap.mmap(-1, 8 * 2 * kills)).cast("Q")  # by writer: how many puts have returned

    def write(writer: int) -> None:
        end, sizes = Ring.attach(ring.address), random.Random(writer)
        for number in range(1 << 40):
            end.put(body(writer, number, sizes.choice((50, 3000, 100_000))), timeout=LIMIT)
            returned[writer] = number + 1

    def read() -> None:
        end = Ring.attach(ring.address)
        while True:
            with end.get(timeout=LIMIT) as record:
                os.write(log, struct.pack("<QQ", *parse(record.data)))

    names = iter(range(2 * kills))
    jobs = [lambda: start(write, next(names))] * 3 + [lambda: start(read)] * 3
    running = [job() for job in jobs]
    for _ in range(kills):
        time.sleep(chance.random() * 0.008)
        i = chance.randrange(6)
        kill(running[i])
        running[i] = jobs[i]()
    kill(*running)
    writers = next(names)
    reader = start(read)
    before = time.monotonic()
    while ring.occupancy and time.monotonic() < before + 10:
        time.sleep(0.01)
    kill(reader)
    seen = collections.Counter(struct.iter_unpack("<QQ", os.pread(log, 1 << 30, 0)))
    for writer in range(writers):
        committed = returned[writer]
        mine = {number for who, number in seen if who == writer}
        assert mine in (set(range(committed)), set(range(committed + 1))), (writer, committed)
    assert len(seen) > 2000 and seen.total() - len(seen) <= 2 * kills
    assert ring.occupancy == 0 and ring.counts["damaged"] == 0
    ring.put(NOISE[: ring.max_record], timeout=5)
    assert drain(ring) == [NOISE[: ring.max_record]]


def test_nothing_is_left_when_everyone_is_killed():
    seen, write = os.pipe()

    def everyone() -> None:
        made = Ring.create(1 << 20)
        for _ in range(2):
            start(hold, made.address, write)
            made.put(b"x")
            pipe_byte(seen)
        os.write(out, f"{made.address} {os.readlink(f'/proc/self/fd/{made.fd}')}".encode())
        time.sleep(LIMIT)

    def group() -> None:
        os.setpgid(0, 0)
        everyone()

    back, out = os.pipe()
    pid = start(group)
    assert select.select([back], [], [], LIMIT)[0]
    address, name = os.read(back, 1000).decode().split(" ", 1)
    assert name.startswith("/memfd:rl-ring-") and users_of(name)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 10
    while users_of(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not users_of(name)
    assert not [file for file in os.listdir("/dev/shm") if "rl-ring" in file]
    with pytest.raises(OSError):
        Ring.attach(address)


def users_of(name: str) -> list[str]:
    """Processes that have this file mapped."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            found += [pid] if name.removesuffix(" (deleted)") in maps.read() else []
    return found

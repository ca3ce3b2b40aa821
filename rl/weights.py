"""Weights from the learners to all generators: versioned, streamed in buckets over the bridge, and verified.

    learner:    publisher.publish(version)      takes a copy and returns; a thread sends it while training goes on
    generator:  subscriber.receive(version)     between two engine steps, straight into the engine's memory where it allows that
                subscriber.in_force(state)      what counts here of an announcement: versions one by one (rl/arrival.py)

Each publish ends with the learner's digest of every parameter. The generator compares it with the digest of what its engine
now computes with, and stops the job where one differs: weights that were not updated are the silent fault of such systems.

With --publish delta a publish sends what has changed since the one before (rl/delta.py); the digests are of the whole.

Memory: a learner that sends holds one copy in the generators' precision, in host memory; a generator none, or if its engine
does not adopt memory, a few buckets (on the first of a node up to 32) or its largest parameter. --publish delta takes one copy
more in host memory, of a learner that sends and of a generator whose engine does not adopt memory; weights that come in while
the engine goes on take one of a generator.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import torch

from rl import delta, watchdog
from rl.arrival import Announcements, Arrival, has_room
from rl.channel import State
from rl.device import is_accelerator, side_stream
from rl.digests import Digests, digest
from rl.dist import Split
from rl.engine import Engine
from rl.learner import Learner

BUCKET_BYTES = 32 << 20  # what travels at once; the next buckets are under way meanwhile
LEAST_BYTES = 1 << 20  # of a bucket of a small model, of which four or more buckets overlap


@dataclass(frozen=True)
class Bucket:
    """A run of the stream: whole parameters, or a part of one that is larger than a bucket."""

    members: range  # parameters, by number
    start: int  # elements of the stream before it
    stop: int
    is_part: bool
    ends: bool  # whether its last parameter is complete with it

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, stream: torch.Tensor) -> torch.Tensor:
        return stream[self.start : self.stop]


@dataclass(frozen=True)
class Plan:
    """The parameters to send and their order, the same on both sides. The stream is all parameters, end to end."""

    names: list[str]
    shapes: list[list[int]]
    dtype: torch.dtype
    frozen: int = 0  # so many at the end never change: they are sent once
    delta: bool = False  # whether a table says what is sent of each bucket

    @cached_property
    def offsets(self) -> list[int]:
        """The first element of each parameter in the stream, and the end of the last."""
        return [0, *accumulate(math.prod(shape) for shape in self.shapes)]

    @cached_property
    def buckets(self) -> list[Bucket]:
        quarter = max(LEAST_BYTES, self.offsets[-1] * self.dtype.itemsize // 4)
        limit, out, first = min(BUCKET_BYTES, quarter) // self.dtype.itemsize, [], 0
        for i in range(len(self.names)):
            start, stop = self.offsets[i], self.offsets[i + 1]
            if stop - self.offsets[first] > limit and first < i:
                out.append(Bucket(range(first, i), self.offsets[first], start, False, True))
                first = i
            if stop - start > limit:
                cuts = [*range(start, stop, limit), stop]
                out += [Bucket(range(i, i + 1), a, b, True, b == stop) for a, b in pairwise(cuts)]
                first = i + 1
        if first < len(self.names):
            out.append(Bucket(range(first, len(self.names)), self.offsets[first], self.offsets[-1], False, True))
        return out

    def views(self, run: torch.Tensor, members: range) -> list[torch.Tensor]:
        """The parameters `members` of a run of the stream that begins with the first of them, in their shapes."""
        base, ends = self.offsets[members.start], self.offsets
        return [run[ends[i] - base : ends[i + 1] - base].view(self.shapes[i]) for i in members]

    def later(self) -> "Plan":
        """The plan of all publishes but the first: its stream is a beginning of this one's."""
        trained = len(self.names) - self.frozen
        return replace(self, names=self.names[:trained], shapes=self.shapes[:trained], frozen=0) if self.frozen else self

    def to_json(self) -> str:
        return json.dumps([self.names, self.shapes, str(self.dtype).removeprefix("torch."), self.frozen, self.delta])

    @staticmethod
    def from_json(text: str | bytes) -> "Plan":
        names, shapes, dtype, *rest = json.loads(text)
        return Plan(names, shapes, getattr(torch, dtype), *rest)


class Publisher:
    """The learners' side. Those that send have a copy; the others take part in gathering the shards."""

    def __init__(self, learner: Learner, split: Split, dtype: torch.dtype, publish: Literal["full", "delta"] = "full"):
        self.learner, self.split, self.device = learner, split, split.ranks.device
        shapes = [list(parameter.shape) for parameter in learner.parameters.values()]
        self.plan = Plan(list(learner.parameters), shapes, dtype, len(learner.frozen), publish == "delta")
        self._is_first = True
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._sent: torch.Tensor | None = None  # the copy before, where changes are sent
        self._whole = self.plan  # what a generator gets first
        self._reading, self._has_copy = threading.Lock(), threading.Event()  # the lock is held by whoever uses the copy
        if split.bridge:
            self._stream = self._new()
            split.store.set("weights/plan", self.plan.to_json())
            if split.elastic:
                split.elastic.lobby.serve(self)

    def publish(self, version: int) -> None:
        """Waits until the publish before has been received, copies the weights (all learners together), and returns; what
        then goes over the bridge is the copy. The generators have to be told of the version."""
        self.wait()
        if self._is_first and self.split.bridge:
            self.split.store.set("weights/first", str(version))
        with self._reading:
            self.take_copy()
            self._version = version
        self.send(version)

    def take_copy(self) -> None:
        """Copies the weights into the stream that is sent. A collective of the learners."""
        if not self._is_first:
            self.plan = self.plan.later()
            if self.plan.delta and self.split.bridge:
                self._stream, self._sent = self._new_like() if self._sent is None else self._sent, self._stream
        copies = self.plan.views(self._stream, range(len(self.plan.names))) if self.split.bridge else []
        for number, (_, tensor) in enumerate(self.learner.weights(self.plan.dtype, self.split.senders, self._is_first)):
            copies[number].copy_(tensor)
        self._is_first = False

    def send(self, version: int) -> None:
        """Begins to send the copy, in the background."""
        if self.split.bridge:
            self._thread = threading.Thread(target=self._send, args=(version,), daemon=True)
            self._thread.start()
            self._has_copy.set()

    def greet(self, link, tell: Callable[[int], None]) -> None:
        """Sends all of the newest copy to one who has nothing, over a link of its own; tell: is called with its version before.
        For any thread."""
        self._has_copy.wait()
        with self._reading:
            tell(self._version)
            self._broadcast(self._version, link, self._whole, compares=False)
            self.split.bridge.add(link, self._version)

    def wait(self) -> None:
        """Returns when the generators have what was published; raises what went wrong with it."""
        if self._thread:
            with watchdog.doing("the generators to take the weights"):
                self._thread.join()
            self._thread = None
        if self._error:
            raise self._error

    def _send(self, version: int) -> None:
        try:
            with self._reading, side_stream(self.device):
                if self.split.elastic:
                    self.split.bridge.begin(version)
                self._broadcast(version, self.split.bridge, self.plan, compares=self._sent is not None)
        except BaseException as error:  # raised again in the main thread
            self._error = error

    def _broadcast(self, version: int, bridge, plan: Plan, compares: bool) -> None:
        under_way = deque()

        def send(data: torch.Tensor) -> None:
            under_way.append((bridge.broadcast(data), data))
            if len(under_way) == bridge.window:
                under_way.popleft()[0].wait()
                watchdog.progress()

        digests = Digests(plan, self.device)
        changes = [self._change(bucket, digests) for bucket in plan.buckets] if compares else []
        rows = [change.row for change in changes] or [delta.Row(0, 0, bucket.size) for bucket in plan.buckets]
        if plan.delta:
            send(torch.tensor(rows).to(bridge.device))
        for numbers, _ in delta.messages(rows, plan.dtype.itemsize):
            bucket = plan.buckets[numbers[0]]
            whole = not rows[numbers[0]].width
            data = bucket.of(self._stream) if whole else delta.join([changes[number] for number in numbers])
            data = data.to(bridge.device)
            send(data)
            if not compares:
                digests.add(bucket, data.to(self.device))  # while it travels
        send(torch.tensor([version, *digests.values()]).to(bridge.device))
        for work, _ in under_way:
            work.wait()

    def _change(self, bucket: Bucket, digests: "Digests") -> delta.Change:
        watchdog.progress()
        data = bucket.of(self._stream).to(self.device)
        digests.add(bucket, data)
        return delta.Change.between(bucket.of(self._sent).to(self.device), data)

    def _new_like(self) -> torch.Tensor:
        """Another stream; with what never changes where a generator may yet come that has nothing."""
        if not self.split.elastic:
            return self._new()
        return self._stream.clone().pin_memory() if self._stream.is_pinned() else self._stream.clone()

    def _new(self) -> torch.Tensor:
        return torch.empty(self.plan.offsets[-1], dtype=self.plan.dtype, pin_memory=is_accelerator(self.device))


class Subscriber:
    """A generator's side."""

    def __init__(self, split: Split, engine: Engine, overlaps: bool = False):
        """overlaps: whether the engine may go on while weights come over a network, where there is memory for that."""
        self.engine, self.bridge, self.device = engine, split.bridge, split.ranks.device
        with watchdog.doing("the learner to load the model"):
            self.plan = Plan.from_json(split.store.get("weights/plan"))
        if split.is_member:
            self.bridge.open()
        self._split, self._announcements = split, Announcements(split.store)
        # Of the newest publish: bytes, the share of elements that had changed, seconds on its way while the engine went on.
        self.received: dict[str, float] = {}
        self._kept: list[tuple[str, torch.Tensor]] = []  # what never changes, for an engine that is always given all
        self._memory = None  # laid out as the stream: what arrives is in place at once
        is_ahead = (
            overlaps and self.bridge.is_far and has_room(split, self.plan.offsets[-1] * self.plan.dtype.itemsize, self._pins)
        )
        self._ahead = Arrival(self._come_in) if is_ahead else None
        self._shares = engine.shares_memory and not self._ahead  # the memory is the engine's own
        if self._ahead:
            self._memory = self._new(self.plan.offsets[-1], self.plan.dtype)
        elif self._shares:
            self._memory = torch.empty(self.plan.offsets[-1], dtype=self.plan.dtype, device=engine.device)
            engine.share_parameters(dict(zip(self.plan.names, self.plan.views(self._memory, self._all), strict=True)))
        elif self.plan.delta:
            self._memory = torch.empty(self.plan.offsets[-1], dtype=self.plan.dtype)

    @property
    def _all(self) -> range:
        return range(len(self.plan.names))

    def in_force(self, state: State, busy: bool) -> State:
        """What counts here when the learners' newest message is `state`: the version that comes next and what was said with it,
        not while it is on its way and the generator is busy. One that is not, or has to stop, waits for it in `receive`."""
        newer = self.next_version(state.version)
        if self._ahead and self.engine.version >= 0:  # before, there is nothing to go on with
            newer = self._ahead.newest(newer, self.engine.version, busy and not state.stop)
        return self._announcements.of(newer, state) if newer >= 0 else state

    def next_version(self, announced: int) -> int:
        """The version to receive next, when the newest that was announced is this; -1 for none. Each is sent once, from the
        first of the run on, or to a generator that has joined from the one on with which it was let in."""
        if self.engine.version < 0:
            return self._first if announced >= self._first else -1
        return min(announced, self.engine.version + 1)

    @cached_property
    def _first(self) -> int:
        return self.bridge.first if self._split.is_member else int(self._split.store.get("weights/first"))

    def receive(self, version: int, recompute_kv: bool = False) -> None:
        """Gives the engine the weights of `version`, which the learner has announced, and verifies them.

        Raises RuntimeError, naming the parameter, if the engine's weights are not those that were sent.
        """
        if self._ahead:
            self._ahead.wait()
        digests, arrived = (Digests(self.plan, self.device) for _ in range(2))
        self.engine.update(self._incoming(digests, arrived), version, recompute_kv)
        found = digests.values()
        if not self._shares:
            self._check_loaded(version, arrived.values())
        else:
            for i in self._moved():
                found[i] = digest(self.engine.read_back(self.plan.names[i]), self.device)
        last, table = self._table
        self._wait(last)
        sent_version, *sent = table.tolist()
        if sent_version != version:
            raise RuntimeError(f"the learner sent version {sent_version} of the weights, version {version} is due")
        for name, theirs, ours in zip(self.plan.names, sent, found, strict=True):
            if theirs != ours:
                raise RuntimeError(f"version {version}: the generator's {name} is not what the learner sent")
        self.plan = self.plan.later()

    def _moved(self) -> list[int]:
        """Parameters whose memory has moved out of the stream since the engine was told to share it."""
        addresses = [self._memory.data_ptr() + offset * self.plan.dtype.itemsize for offset in self.plan.offsets]
        return [i for i, name in enumerate(self.plan.names) if self.engine.read_back(name).data_ptr() != addresses[i]]

    def _check_loaded(self, version: int, arrived: list[int]) -> None:
        """Compares what an engine with memory of its own has made of the parameters with what it was given."""
        for number, name in enumerate(self.plan.names):
            live = self.engine.read_back(name)
            if live is None:
                continue
            if digest(live.to(self.plan.dtype) + 0.0, self.device) != arrived[number]:
                raise RuntimeError(f"version {version}: the generator's {name} is not what the learner sent")

    def _incoming(self, digests: "Digests", arrived: "Digests") -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every parameter, as it is complete. Feeds the digests; `arrived` takes -0.0 as 0.0, because an
        engine may hold the weights in a form that knows only one zero."""
        parts, kept = [], []  # parts: of a parameter that comes in several buckets
        for bucket, data in self._arriving():
            digests.add(bucket, data)
            if not self._shares:
                arrived.add(bucket, data + 0.0)
                parts.append(data)
            if not bucket.ends:
                continue
            if self._shares:
                run = self._memory[self.plan.offsets[bucket.members.start] :]
            else:
                run, parts = torch.cat(parts) if bucket.is_part else data, []
            for i, value in zip(bucket.members, self.plan.views(run, bucket.members), strict=True):
                yield self.plan.names[i], value
                if i >= len(self.plan.names) - self.plan.frozen:
                    kept.append((self.plan.names[i], value if self._shares else value.clone()))
        yield from self._kept
        self._kept = self._kept or kept

    def _arriving(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """The buckets and their data in order, as they come; also those in which nothing has changed, which do not come."""
        if self._ahead:  # they are all there
            came = ((bucket, bucket.of(self._memory)) for bucket in self.plan.buckets)
        else:
            came = self._coming_in()
        for bucket, data in came:
            yield bucket, data.to(self.device)

    def _come_in(self) -> None:
        """Receives a publish into the memory; for a thread."""
        began = time.monotonic()
        for _ in self._coming_in():
            pass
        self._wait(self._table[0])
        self.received["way"] = time.monotonic() - began

    def _coming_in(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        self.received = {"bytes": 0, "changed": 1.0, "way": 0.0}
        buckets, done = self.plan.buckets, 0
        rows = self._rows()
        for numbers, data in self._messages(rows):
            if self._memory is not None:
                self._put_in_place(numbers, [rows[number] for number in numbers], data)
            for bucket in buckets[done : numbers[-1] + 1]:
                yield bucket, data if self._memory is None else bucket.of(self._memory)
            done = numbers[-1] + 1
        for bucket in buckets[done:]:
            yield bucket, bucket.of(self._memory)

    def _rows(self) -> list[delta.Row]:
        """What is sent of each bucket."""
        if not self.plan.delta:
            return [delta.Row(0, 0, bucket.size) for bucket in self.plan.buckets]
        table = torch.empty(len(self.plan.buckets), 3, dtype=torch.long, device=self.bridge.device)
        self._wait(self.bridge.broadcast(table))
        rows = [delta.Row(*row) for row in table.tolist()]
        self.received["changed"] = sum(row.differing for row in rows) / self.plan.offsets[-1]
        return rows

    def _messages(self, rows: list[delta.Row]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """(numbers of buckets, data) of each message; the next ones are on their way while one is used."""
        under_way = deque()

        def arrived():
            work, numbers, data = under_way.popleft()
            self._wait(work)
            self.received["bytes"] += data.nbytes
            return numbers, data

        for numbers, size in delta.messages(rows, self.plan.dtype.itemsize):
            data = self._new(size, torch.uint8) if size else self._room(self.plan.buckets[numbers[0]])
            under_way.append((self.bridge.broadcast(data), numbers, data))
            if len(under_way) == self.bridge.window:
                yield arrived()
        table = torch.empty(1 + len(self.plan.names), dtype=torch.long, device=self.bridge.device)
        self._table = self.bridge.broadcast(table), table  # what comes last, on its way with the rest
        while under_way:
            yield arrived()

    def _room(self, bucket: Bucket) -> torch.Tensor:
        """Where a whole bucket is received."""
        if self._memory is not None and self._memory.device == self.bridge.device:
            return bucket.of(self._memory)
        return self._new(bucket.size, self.plan.dtype)

    def _put_in_place(self, numbers: list[int], rows: list[delta.Row], data: torch.Tensor) -> None:
        """Brings a message into the memory."""
        if rows[0].width:
            for number, change in zip(numbers, delta.split(data, rows, self.plan.dtype), strict=True):
                change.apply(self.plan.buckets[number].of(self._memory))
        elif self._memory.device != data.device:
            self.plan.buckets[numbers[0]].of(self._memory).copy_(data)

    def _wait(self, work) -> None:
        with watchdog.doing("a bucket of the weights"):
            work.wait()
        watchdog.progress()

    def _new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Where something is received: pinned, if it goes on from the host to an accelerator."""
        return torch.empty(size, dtype=dtype, device=self.bridge.device, pin_memory=self._pins)

    @property
    def _pins(self) -> bool:
        return is_accelerator(self.device) and not is_accelerator(self.bridge.device)

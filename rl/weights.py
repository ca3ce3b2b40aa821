"""Weights from the learners to all generators: versioned, streamed in buckets over the bridge, and verified.

    learner:    publisher.publish(version)      takes a copy and returns; a thread sends it while training goes on
    generator:  subscriber.receive(version)     between two engine steps, straight into the engine's memory where it allows that

Each publish ends with the learner's digest of every parameter. The generator compares it with the digest of what its engine
now computes with, and stops the job where one differs: weights that were not updated are the silent fault of such systems.

Memory: the first learner holds one copy in the generators' precision, in host memory; a generator none, or if its engine does
not adopt memory, a few buckets or its largest parameter.
"""

import json
import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import xxhash

from rl import watchdog
from rl.device import is_accelerator, side_stream
from rl.dist import Split
from rl.engine import Engine
from rl.learner import Learner

BUCKET_BYTES = 32 << 20  # what travels at once; the next buckets are under way meanwhile
UNDER_WAY = 3  # buckets


@dataclass(frozen=True)
class Bucket:
    """A run of the stream: whole parameters, or a part of one that is larger than a bucket."""

    members: range  # parameters, by number
    start: int  # elements of the stream before it
    stop: int
    is_part: bool
    ends: bool  # whether its last parameter is complete with it


@dataclass(frozen=True)
class Plan:
    """The parameters to send and their order, the same on both sides. The stream is all parameters, end to end."""

    names: list[str]
    shapes: list[list[int]]
    dtype: torch.dtype
    frozen: int = 0  # so many at the end never change: they are sent once

    @cached_property
    def offsets(self) -> list[int]:
        """The first element of each parameter in the stream, and the end of the last."""
        return [0, *accumulate(math.prod(shape) for shape in self.shapes)]

    @cached_property
    def buckets(self) -> list[Bucket]:
        limit, out, first = BUCKET_BYTES // self.dtype.itemsize, [], 0
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
        return Plan(self.names[:trained], self.shapes[:trained], self.dtype) if self.frozen else self

    def to_json(self) -> str:
        return json.dumps([self.names, self.shapes, str(self.dtype).removeprefix("torch."), self.frozen])

    @staticmethod
    def from_json(text: str | bytes) -> "Plan":
        names, shapes, dtype, frozen = json.loads(text)
        return Plan(names, shapes, getattr(torch, dtype), frozen)


class Publisher:
    """The learners' side. The first learner sends; the others take part in gathering the shards."""

    def __init__(self, learner: Learner, split: Split, dtype: torch.dtype):
        self.learner, self.split = learner, split
        shapes = [list(parameter.shape) for parameter in learner.parameters.values()]
        self.plan = Plan(list(learner.parameters), shapes, dtype, len(learner.frozen))
        self._is_first = True
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if split.bridge:
            pinned = is_accelerator(split.ranks.device)
            self._stream = torch.empty(self.plan.offsets[-1], dtype=dtype, pin_memory=pinned)
            split.store.set("weights/plan", self.plan.to_json())

    def publish(self, version: int) -> None:
        """Waits until the publish before has been received, copies the weights (all learners together), and returns; what
        then goes over the bridge is the copy. The generators have to be told of the version."""
        self.wait()
        self.take_copy()
        self.send(version)

    def take_copy(self) -> None:
        """Copies the weights into the stream that is sent. A collective of the learners."""
        if not self._is_first:
            self.plan = self.plan.later()
        copies = self.plan.views(self._stream, range(len(self.plan.names))) if self.split.bridge else []
        for number, (_, tensor) in enumerate(self.learner.weights(self.plan.dtype, to_all=False, frozen=self._is_first)):
            copies[number].copy_(tensor)
        self._is_first = False

    def send(self, version: int) -> None:
        """Begins to send the copy, in the background."""
        if self.split.bridge:
            self._thread = threading.Thread(target=self._send, args=(version,), daemon=True)
            self._thread.start()

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
            with side_stream(self.split.bridge.device):
                self._broadcast(version)
        except BaseException as error:  # raised again in the main thread
            self._error = error

    def _broadcast(self, version: int) -> None:
        bridge, under_way = self.split.bridge, deque()
        digests = Digests(self.plan, self.split.ranks.device)
        for bucket in self.plan.buckets:
            data = self._stream[bucket.start : bucket.stop].to(bridge.device)
            under_way.append((bridge.broadcast(data), data))
            digests.add(bucket, data)  # while it travels
            if len(under_way) == UNDER_WAY:
                under_way.popleft()[0].wait()
                watchdog.progress()
        table = torch.tensor([version, *digests.values()]).to(bridge.device)
        under_way.append((bridge.broadcast(table), table))
        for work, _ in under_way:
            work.wait()


class Subscriber:
    """A generator's side."""

    def __init__(self, split: Split, engine: Engine):
        self.engine, self.bridge, self.device = engine, split.bridge, split.ranks.device
        with watchdog.doing("the learner to load the model"):
            self.plan = Plan.from_json(split.store.get("weights/plan"))
        self.bytes = 0  # that the newest publish had
        self._kept: list[tuple[str, torch.Tensor]] = []  # what never changes, for an engine that is always given all
        self._memory = None  # the engine's own, laid out as the stream: what arrives is in place at once
        if engine.shares_memory and engine.device == self.bridge.device:
            self._memory = self._new(self.plan.offsets[-1])
            engine.share_parameters(dict(zip(self.plan.names, self.plan.views(self._memory, self._all), strict=True)))

    @property
    def _all(self) -> range:
        return range(len(self.plan.names))

    def next_version(self, announced: int) -> int:
        """The version to receive next, when the newest that was announced is this: each is sent once, but a generator that has
        just started begins with the newest."""
        return announced if self.engine.version < 0 else min(announced, self.engine.version + 1)

    def receive(self, version: int, recompute_kv: bool = False) -> None:
        """Gives the engine the weights of `version`, which the learner has announced, and verifies them.

        Raises RuntimeError, naming the parameter, if the engine's weights are not those that were sent.
        """
        self.bytes = self.plan.offsets[-1] * self.plan.dtype.itemsize
        digests, arrived = (Digests(self.plan, self.device) for _ in range(2))
        self.engine.update(self._incoming(digests, arrived), version, recompute_kv)
        found = digests.values()
        if self._memory is None:
            self._check_loaded(version, arrived.values())
        else:
            for i in self._moved():
                found[i] = digest(self.engine.read_back(self.plan.names[i]), self.device)
        table = torch.empty(1 + len(self.plan.names), dtype=torch.long, device=self.bridge.device)
        self.bridge.broadcast(table).wait()
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
            if self._memory is None:
                arrived.add(bucket, data + 0.0)
                parts.append(data)
            if not bucket.ends:
                continue
            if self._memory is not None:
                run = self._memory[self.plan.offsets[bucket.members.start] :]
            else:
                run, parts = torch.cat(parts) if bucket.is_part else data, []
            for i, value in zip(bucket.members, self.plan.views(run, bucket.members), strict=True):
                yield self.plan.names[i], value
                if i >= len(self.plan.names) - self.plan.frozen:
                    kept.append((self.plan.names[i], value if self._memory is not None else value.clone()))
        yield from self._kept
        self._kept = self._kept or kept

    def _arriving(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """The buckets and their data as they come; the next ones are on their way while one is used."""
        under_way = deque()
        for bucket in self.plan.buckets:
            new = self._memory is None
            data = self._new(bucket.stop - bucket.start) if new else self._memory[bucket.start : bucket.stop]
            under_way.append((self.bridge.broadcast(data), bucket, data))
            if len(under_way) == UNDER_WAY:
                work, *arrived = under_way.popleft()
                self._wait(work)
                yield tuple(arrived)
        for work, *arrived in under_way:
            self._wait(work)
            yield tuple(arrived)

    def _wait(self, work) -> None:
        with watchdog.doing("a bucket of the weights"):
            work.wait()
        watchdog.progress()

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.plan.dtype, device=self.bridge.device)


class Digests:
    """A 64-bit digest of each parameter's bits, fed with the buckets in order: xxh3 on CPU machines; on accelerators a sum of
    the bits weighted by position, which needs no order and so runs there."""

    def __init__(self, plan: Plan, device: torch.device):
        self.plan, self.on_host = plan, not is_accelerator(device)
        self._hashes = [xxhash.xxh3_64() for _ in plan.names] if self.on_host else []
        self._sums: list[list[torch.Tensor]] = [[] for _ in plan.names]

    def add(self, bucket: Bucket, data: torch.Tensor) -> None:
        """data: the bucket, contiguous."""
        offsets, size = self.plan.offsets, self.plan.dtype.itemsize
        raw = memoryview(data.view(torch.uint8).numpy()) if self.on_host else None
        for i in bucket.members:
            start, stop = max(bucket.start, offsets[i]) - bucket.start, min(bucket.stop, offsets[i + 1]) - bucket.start
            if raw is not None:
                self._hashes[i].update(raw[start * size : stop * size])
            else:
                self._sums[i].append(_weighted_sum(data[start:stop], first=bucket.start + start - offsets[i]))

    def values(self) -> list[int]:
        """Signed, so that they fit into a tensor."""
        if self.on_host:
            return [_signed(h.intdigest()) for h in self._hashes]
        return [_signed(sum(map(int, sums))) for sums in self._sums]


def digest(tensor: torch.Tensor, device: torch.device) -> int:
    """The digest of a single tensor, as Digests would find it."""
    flat = tensor.contiguous().view(-1)
    if not is_accelerator(device):
        return _signed(xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy()))
    return _signed(int(_weighted_sum(flat, first=0)))


def _weighted_sum(flat: torch.Tensor, first: int) -> torch.Tensor:
    """The elements' bits as whole numbers, each times an odd weight that depends on its position, summed modulo 2^64."""
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)
    total = torch.zeros((), dtype=torch.long, device=bits.device)
    for start in range(0, len(bits), 1 << 24):
        run = bits[start : start + (1 << 24)].long()
        position = torch.arange(first + start, first + start + len(run), device=bits.device)
        total += (run * (position % 65_521 * 2 + 1)).sum()
    return total


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value

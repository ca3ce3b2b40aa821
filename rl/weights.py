"""Weights from the learners to all generators: versioned, streamed in buckets over the bridge, and verified.

    learner:    publisher.publish(version)      takes a copy and returns; a thread sends it while training goes on
    generator:  subscriber.receive(engine, version)   between two engine steps, straight into the engine's parameters

Each publish ends with the learner's digest of every parameter. The generator compares it with the digest of what its engine
now computes with, and stops the job where one differs: weights that were not updated are the silent fault of such systems.

Memory: the first learner holds one copy in the generators' precision, in host memory; a generator two buckets.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash

from rl.dist import Split, side_stream
from rl.engine import Engine
from rl.learner import Learner

BUCKET_BYTES = 16 << 20  # whole parameters are put together up to this size; a larger one travels alone


@dataclass(frozen=True)
class Plan:
    """What is sent, in which order: the same on both sides."""

    names: list[str]
    shapes: list[list[int]]
    dtype: torch.dtype

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    def buckets(self) -> list[range]:
        """Runs of parameters, by number, of at most BUCKET_BYTES unless it is a single one."""
        limit, out, first, filled = BUCKET_BYTES // self.dtype.itemsize, [], 0, 0
        for i, size in enumerate(self.sizes):
            if filled and filled + size > limit:
                out.append(range(first, i))
                first, filled = i, 0
            filled += size
        return [*out, range(first, len(self.sizes))]

    def views(self, flat: torch.Tensor, members: range) -> list[torch.Tensor]:
        """The parameters `members`, that stand end to end at the beginning of `flat`, in their shapes."""
        sizes = [self.sizes[i] for i in members]
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(self.shapes[i]) for i, part in zip(members, parts, strict=True)]

    def to_json(self) -> str:
        return json.dumps([self.names, self.shapes, str(self.dtype).removeprefix("torch.")])

    @staticmethod
    def from_json(text: str | bytes) -> "Plan":
        names, shapes, dtype = json.loads(text)
        return Plan(names, shapes, getattr(torch, dtype))


class Publisher:
    """The learners' side. The first learner sends; the others take part in gathering the shards."""

    def __init__(self, learner: Learner, split: Split, dtype: torch.dtype):
        self.learner, self.split = learner, split
        named = [(name, list(p.shape)) for name, p in learner.policy.model.named_parameters()]
        self.plan = Plan([name for name, _ in named], [shape for _, shape in named], dtype)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if split.bridge:
            pinned = split.ranks.device.type != "cpu"
            self._copy = torch.empty(sum(self.plan.sizes), dtype=dtype, pin_memory=pinned)
            split.store.set("weights/plan", self.plan.to_json())

    def publish(self, version: int) -> None:
        """Waits until the publish before has been received, copies the weights (all learners together), and returns; what
        then goes over the bridge is the copy. The generators have to be told of the version."""
        self.wait()
        places = self.plan.views(self._copy, range(len(self.plan.names))) if self.split.bridge else self.plan.names
        for place, (_, tensor) in zip(places, self.learner.weights(), strict=True):
            if self.split.bridge:
                place.copy_(tensor)
        if self.split.bridge:
            self._thread = threading.Thread(target=self._send, args=(version,), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until the generators have what was published; raises what went wrong with it."""
        if self._thread:
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
        bridge, kind = self.split.bridge, self.split.ranks.device.type
        bridge.broadcast(torch.tensor([version]).to(bridge.device)).wait()
        digests, under_way, start = [], deque(), 0
        for members in self.plan.buckets():
            size = sum(self.plan.sizes[i] for i in members)
            bucket = self._copy[start : start + size].to(bridge.device)
            under_way.append((bridge.broadcast(bucket), bucket))
            digests += [digest(part, kind) for part in self.plan.views(bucket, members)]  # while it travels
            start += size
            if len(under_way) > 2:
                under_way.popleft()[0].wait()
        table = torch.tensor(digests).to(bridge.device)
        under_way.append((bridge.broadcast(table), table))
        for work, _ in under_way:
            work.wait()


class Subscriber:
    """A generator's side."""

    def __init__(self, split: Split):
        self.bridge, self.kind = split.bridge, split.ranks.device.type
        self.plan = Plan.from_json(split.store.get("weights/plan"))
        self._buckets = self.plan.buckets()
        largest = max(sum(self.plan.sizes[i] for i in members) for members in self._buckets)
        self._space = [torch.empty(largest, dtype=self.plan.dtype, device=self.bridge.device) for _ in range(2)]
        self.bytes = sum(self.plan.sizes) * self.plan.dtype.itemsize

    def receive(self, engine: Engine, version: int, recompute_kv: bool = False) -> float:
        """Gives the engine the weights of `version` and verifies them. Returns the seconds from when the learner was there.

        Raises RuntimeError, naming the parameter, if the engine's weights are not those that were sent.
        """
        announced = torch.empty(1, dtype=torch.long, device=self.bridge.device)
        self.bridge.broadcast(announced).wait()
        started = time.perf_counter()
        if announced.item() != version:
            raise RuntimeError(f"the learner sends version {announced.item()} of the weights, version {version} is due")
        found: list[int] = []
        engine.update(self._incoming(engine, found), version, recompute_kv)
        if not found:
            found = [digest(engine.loaded(name), self.kind) for name in self.plan.names]
        table = torch.empty(len(self.plan.names), dtype=torch.long, device=self.bridge.device)
        self.bridge.broadcast(table).wait()
        for name, sent, is_now in zip(self.plan.names, table.tolist(), found, strict=True):
            if sent != is_now:
                raise RuntimeError(f"version {version}: the generator's {name} is not what the learner sent")
        return time.perf_counter() - started

    def _incoming(self, engine: Engine, found: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every parameter. The next bucket is on its way while the engine takes the tensors of this one;
        an engine that loads in place is looked at right behind each, while the parameter is in the cache."""
        work = self._post(0)
        for i, members in enumerate(self._buckets):
            work.wait()
            views = self.plan.views(self._space[i % 2], members)
            if i + 1 < len(self._buckets):
                work = self._post(i + 1)
            for number, tensor in zip(members, views, strict=True):
                name = self.plan.names[number]
                yield name, tensor
                if engine.loads_in_place:
                    found.append(digest(engine.loaded(name), self.kind))

    def _post(self, i: int):
        size = sum(self.plan.sizes[number] for number in self._buckets[i])
        return self.bridge.broadcast(self._space[i % 2][:size])


def digest(tensor: torch.Tensor, device_type: str) -> int:
    """A 64-bit digest of the tensor's bits, as a signed number: xxh3 on CPU machines; on accelerators a sum of the bits
    weighted by place, which needs no order and so runs there, wherever the tensor lies."""
    flat = tensor.contiguous().view(-1)
    if device_type == "cpu":
        value = xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy())
        return value - (1 << 64) if value >> 63 else value
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)
    total = torch.zeros((), dtype=torch.long, device=bits.device)
    for start in range(0, len(bits), 1 << 24):
        part = bits[start : start + (1 << 24)].long()
        place = torch.arange(start, start + len(part), device=bits.device)
        total += (part * (place % 65_521 * 2 + 1)).sum()
    return int(total)

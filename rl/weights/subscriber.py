"""A generator's side of the publish (rl/weights/publisher.py): weights arrive over the bridge, go into the engine, and are
verified.

    subscriber.effective_state(state)   the state to act on: versions count one by one (rl/weights/arrival.py)
    subscriber.receive(version)         between two engine steps, straight into the engine's memory if it allows that

Memory: none, or if the engine does not adopt memory, a few buckets (on the first rank of a node up to 32) or its largest
parameter. Weights that arrive while the engine continues take one copy in host memory.
"""

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch

from rl.generation.engine import Engine
from rl.model.attention import dtype_of
from rl.ranks import watchdog
from rl.ranks.device import is_accelerator
from rl.samples.control import State
from rl.split import Split
from rl.weights.arrival import Announcements, Arrival, has_room
from rl.weights.buckets import Bucket, Plan
from rl.weights.digests import Digests, digests_of


class Subscriber:
    """A generator's side."""

    def __init__(self, split: Split, engine: Engine, overlaps: bool = False):
        """overlaps: whether the engine may continue while weights arrive over a network, if there is memory for that."""
        self.engine, self.bridge, self.device = engine, split.bridge, split.ranks.device
        with watchdog.doing("the learner to load the model"):
            self.plan = Plan.from_json(split.store.get("weights/plan"))
        self._store, self._announcements = split.store, Announcements(split.store)
        self._expected = 0  # numbers behind the digests
        if self.plan.adapters:
            from rl.weights.adapter_proof import SIZE  # late: no other run needs it

            self._expected = SIZE
        # Bytes of the newest publish, and the seconds ("way") that it traveled while the engine continued
        self.received: dict[str, float] = {}
        self._kept: list[tuple[str, torch.Tensor]] = []  # parameters that never change, for engines that take whole sets only
        self._has_warned = False
        self._memory = None  # laid out as the stream: data is received in place
        is_ahead = (
            overlaps and self.bridge.is_far and has_room(split, self.plan.offsets[-1] * self.plan.dtype.itemsize, self._pins)
        )
        self._ahead = Arrival(self._receive_ahead) if is_ahead else None
        self._shares = engine.shares_memory and not self._ahead  # the memory is the engine's own
        if self._ahead:
            self._memory = self._new(self.plan.offsets[-1])
        elif self._shares:
            self._memory = torch.empty(self.plan.offsets[-1], dtype=self.plan.dtype, device=engine.device)
            engine.share_parameters(dict(zip(self.plan.names, self.plan.views(self._memory), strict=True)))

    def effective_state(self, state: State, busy: bool) -> State:
        """Return the state that this generator should act on: that of the next version, or of the engine's own if there is no
        newer one. A version still in transit does not count while the generator is busy: one that is idle, or has to stop,
        waits for it in `receive`. state: the learners' newest message."""
        newer = self._next_version(state.version)
        if self._ahead and self.engine.version >= 0:  # before the first weights there is nothing to continue with
            newer = self._ahead.newest(newer, self.engine.version, busy and not state.stop)
        return self._announcements.of(newer, state) if newer >= 0 else replace(state, version=self.engine.version)

    def _next_version(self, announced: int) -> int:
        """Return the version to receive next, -1 for none. Each is sent once, from the first of the run on. announced: the
        newest version that the learners have announced."""
        if self.engine.version < 0:
            return self._first if announced >= self._first else -1
        return min(announced, self.engine.version + 1)

    @cached_property
    def _first(self) -> int:
        return int(self._store.get("weights/first"))

    def receive(self, version: int, recompute_kv: bool = False) -> None:
        """Give the engine the weights of `version`, which the learner has announced, and verify them. Raise RuntimeError, with
        the parameter's name, if the engine's weights are not those that were sent."""
        if self._ahead:
            self._ahead.wait()
        digests, arrived = Digests(self.plan, self.device), []
        self.engine.update(self._incoming(digests, arrived), version, recompute_kv)
        found = digests.values()
        if not self._shares:
            self._check_loaded(version, arrived)
        else:
            moved = self._moved()
            live = (self.engine.read_back(self.plan.names[i]).view(self.plan.dtype) for i in moved)
            for i, value in zip(moved, digests_of(live, self.device), strict=True):
                found[i] = value
        last, table = self._table
        self._wait(last)
        sent_version, *sent = table.tolist()
        if sent_version != version:
            raise RuntimeError(f"the learner sent version {sent_version} of the weights, version {version} is due")
        count = len(self.plan.names)
        for name, theirs, ours in zip(self.plan.names, sent[:count], found, strict=True):
            if theirs != ours:
                raise RuntimeError(f"version {version}: the generator's {name} is not what the learner sent")
        if self.plan.adapters:
            self._prove(version, sent[count:])
        size, self.plan = self.plan.offsets[-1], self.plan.later()
        if self.plan.adapters and self._ahead and self.plan.offsets[-1] < size:
            self._memory = self._new(self.plan.offsets[-1])  # frees the model, which the engine has

    def _prove(self, version: int, expected: list[int]) -> None:
        """Raise RuntimeError if the engine does not apply its adapters. expected: the numbers after the digests."""
        from rl.weights.adapter_proof import check_log_probs, unpacked  # late: no other run needs it

        check_log_probs(self.engine, version, unpacked(expected), self.plan.dtype)

    def _moved(self) -> list[int]:
        """Return the parameters whose memory has moved out of the stream since the engine was asked to share it."""
        addresses = [self._memory.data_ptr() + offset * self.plan.dtype.itemsize for offset in self.plan.offsets]
        return [i for i, name in enumerate(self.plan.names) if self.engine.read_back(name).data_ptr() != addresses[i]]

    def _check_loaded(self, version: int, arrived: list[int]) -> None:
        """Compare the parameters in an engine with memory of its own with those that it was given, and warn once if it cannot
        show some of them. arrived: the digests of the latter."""
        read = []  # numbers of the parameters that the engine shows

        def values() -> Iterator[torch.Tensor]:
            for number, name in enumerate(self.plan.names):
                if (live := self.engine.read_back(name)) is not None:
                    read.append(number)
                    yield live.to(dtype_of(name, self.plan.dtype)) + 0.0

        for number, found in zip(read, digests_of(values(), self.device), strict=True):
            if found != arrived[number]:
                name = self.plan.names[number]
                raise RuntimeError(f"version {version}: the generator's {name} is not what the learner sent")
        hidden = sorted({*range(len(self.plan.names))} - {*read})
        if hidden and not self._has_warned:
            print(
                f"warning: the engine cannot show {len(hidden)} of {len(self.plan.names)} parameters, "
                f"{self.plan.names[hidden[0]]} first. Their publishes are verified as they arrive and not as the engine holds "
                "them; watch training/rollout_probs_diff_mean.",
                file=sys.stderr,
                flush=True,
            )
            self._has_warned = True

    def _incoming(self, digests: Digests, arrived: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter when it is complete. Feeds the digests, and fills `arrived` with the digests
        of the parameters as the engine should hold them. These take -0.0 as 0.0, because an engine may hold the weights in a
        form that knows only one zero."""
        parts, kept = [], []  # parts: of a parameter that arrives in several buckets
        for bucket, data in self._arriving():
            digests.add(bucket, data)
            if not self._shares:
                parts.append(data)
            if not bucket.ends:
                continue
            if self._shares:
                run = self._memory[self.plan.offsets[bucket.members.start] :]
            else:
                run, parts = torch.cat(parts) if bucket.is_part else data, []
            values = self.plan.views(run, bucket.members)
            if not self._shares:
                of_engine = (
                    self.engine.own_part(self.plan.names[i], v) + 0.0 for i, v in zip(bucket.members, values, strict=True)
                )
                arrived += digests_of(of_engine, self.device)
            for i, value in zip(bucket.members, values, strict=True):
                yield self.plan.names[i], value
                if i >= len(self.plan.names) - self.plan.frozen and not self.plan.adapters:
                    kept.append((self.plan.names[i], value if self._shares else value.clone()))
        yield from self._kept
        self._kept = self._kept or kept

    def _arriving(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield the buckets and their data, in order, on the device. With `_ahead` all have been received before."""
        ready = ((bucket, bucket.of(self._memory)) for bucket in self.plan.buckets)
        for bucket, data in ready if self._ahead else self._receiving():
            yield bucket, data.to(self.device)

    def _receive_ahead(self) -> None:
        """Receive a publish into the memory; for a thread."""
        began = time.monotonic()
        for _ in self._receiving():
            pass
        self._wait(self._table[0])
        self.received["way"] = time.monotonic() - began

    def _receiving(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield the buckets and their data as they arrive over the bridge. The next ones travel while one is used."""
        self.received = {"bytes": 0, "way": 0.0}
        memory, under_way = self._memory, deque()
        in_place = memory is not None and memory.device == self.bridge.device

        def arrived() -> tuple[Bucket, torch.Tensor]:
            work, bucket, data = under_way.popleft()
            self._wait(work)
            self.received["bytes"] += data.nbytes
            return bucket, data if in_place or memory is None else bucket.of(memory).copy_(data)

        for bucket in self.plan.buckets:
            data = bucket.of(memory) if in_place else self._new(bucket.size)
            under_way.append((self.bridge.broadcast(data), bucket, data))
            if len(under_way) == self.bridge.window:
                yield arrived()
        table = torch.empty(1 + len(self.plan.names) + self._expected, dtype=torch.long, device=self.bridge.device)
        self._table = self.bridge.broadcast(table), table  # the last message travels with the rest
        while under_way:
            yield arrived()

    def _wait(self, work) -> None:
        with watchdog.doing("a bucket of the weights"):
            work.wait()
        watchdog.progress()

    def _new(self, size: int) -> torch.Tensor:
        """Return memory to receive into: pinned if the data continues to an accelerator."""
        return torch.empty(size, dtype=self.plan.dtype, device=self.bridge.device, pin_memory=self._pins)

    @property
    def _pins(self) -> bool:
        return is_accelerator(self.device) and not is_accelerator(self.bridge.device)

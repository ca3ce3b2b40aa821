"""A generator's side of the publish (rl/weights/publisher.py): weights arrive over the bridge, go into the engine, and are
verified.

    subscriber.effective_state(state)   the state to act on: versions count one by one
    subscriber.receive(version)         between two engine steps, straight into the engine's memory if it allows that

Memory: none, or if the engine does not adopt memory, a few buckets (on the first rank of a node up to 32) or its largest
parameter.
"""

import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch

from rl.generation.engine import Engine
from rl.ranks import watchdog
from rl.ranks.device import is_accelerator
from rl.samples.control import State, announces
from rl.split import Split
from rl.weights.buckets import Bucket, Plan
from rl.weights.digests import Given, digest, digests_of, read


class Announcements:
    """The states of the versions, for a generator that takes them one by one. The control block may be ahead of it: once the
    first generator of each node has a publish, the learners may announce the next one."""

    def __init__(self, store):
        self._store = store
        self._seen: dict[int, State] = {}  # by version: the newest state that this generator has seen

    def of(self, version: int, newest: State) -> State:
        """Return the state while `version`, which must not fall, was the newest, with the `stop` and `snapshot` of `newest`."""
        self._seen = {v: state for v, state in self._seen.items() if v >= version} | {newest.version: newest}
        if version not in self._seen:
            self._seen[version] = State(**json.loads(self._store.get(announces(version))))
        return replace(self._seen[version], stop=newest.stop, snapshot=newest.snapshot)


class Subscriber:
    """A generator's side."""

    def __init__(self, split: Split, engine: Engine):
        self.engine = engine
        self.bridge = split.bridge
        self.device = split.ranks.device
        self.plan = Plan.from_json(split.store.get("weights/plan"))
        self._store = split.store
        self._announcements = Announcements(split.store)
        self._expected = 0  # numbers behind the digests
        if self.plan.adapters:
            from rl.weights.adapter_proof import SIZE  # late: no other run needs it

            self._expected = SIZE
        self.received = 0  # bytes of the newest publish
        self._kept: list[tuple[str, torch.Tensor]] = []  # parameters that never change, for engines that take whole sets only
        self._has_warned = False
        self._memory = None  # the engine's own, laid out as the stream: data is received in place
        self._shares = engine.shares_memory
        if self._shares:
            self._memory = torch.empty(self.plan.offsets[-1], dtype=self.plan.dtype, device=engine.device)
            engine.share_parameters(dict(zip(self.plan.names, self.plan.views(self._memory), strict=True)))

    def effective_state(self, state: State) -> State:
        """Return the state that this generator should act on: that of the next version, or of the engine's own if there is no
        newer one. state: the learners' newest message."""
        newer = self._next_version(state.version)
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
        digests = []
        given = Given(self.engine, self.plan.dtype)
        self.engine.update(self._incoming(digests, given), version, recompute_kv)
        if self._shares:
            found = digests_of(map(self.engine.read_back, self.plan.names), self.device)
        else:
            found = read(digests)
            self._warn_of_hidden(given.check(version))
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
        self.plan = self.plan.later()

    def _prove(self, version: int, expected: list[int]) -> None:
        """Raise RuntimeError if the engine does not apply its adapters. expected: the numbers after the digests."""
        from rl.weights.adapter_proof import check_log_probs, unpacked  # late: no other run needs it

        check_log_probs(self.engine, version, unpacked(expected), self.plan.dtype)

    def _warn_of_hidden(self, hidden: list[str]) -> None:
        """Warn once if the engine cannot show some of its parameters."""
        if hidden and not self._has_warned:
            print(
                f"warning: the engine cannot show {len(hidden)} of {len(self.plan.names)} parameters, "
                f"{hidden[0]} first. Their publishes are verified as they arrive and not as the engine holds "
                "them; watch training/rollout_probs_diff_mean.",
                file=sys.stderr,
                flush=True,
            )
            self._has_warned = True

    def _incoming(self, digests: list, given: Given) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter. For an engine with memory of its own, add to the digests and to `given`."""
        kept = []
        for number, (name, value) in enumerate(self._arriving()):
            if not self._shares:
                digests.append(digest(value, self.device))
                given.add(name, value)
            yield name, value
            if number >= len(self.plan.names) - self.plan.frozen and not self.plan.adapters:
                kept.append((name, value if self._shares else value.clone()))
        yield from self._kept
        self._kept = self._kept or kept

    def _arriving(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter that was sent, on the device."""
        if self._memory is not None:
            for _ in self._receiving():
                pass
            for name, value in zip(self.plan.names, self.plan.views(self._memory), strict=True):
                yield name, value.to(self.device)
            return
        parts = []  # of a parameter that arrives in several buckets
        for bucket, data in self._receiving():
            parts.append(data.to(self.device))
            if bucket.ends:
                run = parts[0] if len(parts) == 1 else torch.cat(parts)
                parts = []
                for number, value in zip(bucket.members, self.plan.views(run, bucket.members), strict=True):
                    yield self.plan.names[number], value

    def _receiving(self) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yield the buckets and their data as they arrive over the bridge. The next ones travel while one is used."""
        self.received = 0
        memory = self._memory
        under_way = deque()
        in_place = memory is not None and memory.device == self.bridge.device

        def arrived() -> tuple[Bucket, torch.Tensor]:
            work, bucket, data = under_way.popleft()
            self._wait(work)
            self.received += data.nbytes
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
        work.wait()
        watchdog.progress()

    def _new(self, size: int) -> torch.Tensor:
        """Return memory to receive into: pinned if the data continues to an accelerator."""
        return torch.empty(size, dtype=self.plan.dtype, device=self.bridge.device, pin_memory=self._pins)

    @property
    def _pins(self) -> bool:
        return is_accelerator(self.device) and not is_accelerator(self.bridge.device)

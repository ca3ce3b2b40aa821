"""A generator's side of the publish (rl/weights/publisher.py): weights arrive over the bridge, go into the engine, and are
verified.

Memory: none, or if the engine does not adopt memory, a few buckets (on the first rank of a node up to 32) or its largest
parameter.
"""

import sys
from collections import deque
from collections.abc import Iterator
from functools import cached_property

import torch

from rl.generation.engine import Engine
from rl.model.attention import dtype_of
from rl.ranks import watchdog
from rl.ranks.device import is_accelerator
from rl.split import Split
from rl.weights.buckets import Bucket, PublishPlan, digest, read


class Subscriber:
    """A generator's side."""

    def __init__(self, split: Split, engine: Engine):
        self.engine = engine
        self.bridge = split.bridge
        self.device = split.ranks.device
        self.plan = PublishPlan.from_json(split.store.get("weights/plan"))
        self._store = split.store
        self.step = 0  # after which the newest weights were published
        self.received = 0  # bytes of the newest publish
        self._kept: list[tuple[str, torch.Tensor]] = []  # parameters that never change, for engines that take whole sets only
        self._has_warned = False
        self._memory = None  # the engine's own, laid out as the stream: data is received in place
        if engine.shares_memory:
            self._memory = torch.empty(self.plan.offsets[-1], dtype=self.plan.dtype, device=engine.device)
            engine.share_parameters(dict(zip(self.plan.names, self.plan.views(self._memory), strict=True)))

    def due(self, announced: int) -> int:
        """Return the version to receive next; the engine's own if there is none. Each is sent once, and received in turn.
        announced: the newest version, which may be further ahead: it is announced when the previous one has been sent."""
        version = self.engine.version
        if version < 0:
            return self._first if announced >= self._first else version
        return min(announced, version + 1)

    @cached_property
    def _first(self) -> int:
        return int(self._store.get("weights/first"))

    def receive(self, version: int, recompute_kv: bool = False) -> None:
        """Give the engine the weights of `version`, which the learner has announced, and verify them. Raise RuntimeError, with
        the parameter's name, if the engine's weights are not those that were sent."""
        digests: list[int | torch.Tensor] = []
        given: dict[str, int | torch.Tensor] = {}
        self.engine.update(self._incoming(digests, given), version, recompute_kv)
        if self._memory is not None:
            digests = [digest(self.engine.read_back(name), self.device) for name in self.plan.names]
        last, table = self._table
        self._wait(last)
        sent_version, self.step, *sent = table.tolist()
        if sent_version != version:
            raise RuntimeError(f"the learner sent version {sent_version} of the weights, version {version} is due")
        for name, theirs, ours in zip(self.plan.names, sent, read(digests), strict=True):
            if theirs != ours:
                raise RuntimeError(f"version {version}: the generator's {name} is not what the learner sent")
        self._check_held(version, given)
        self.plan = self.plan.later()

    def _check_held(self, version: int, given: dict[str, int | torch.Tensor]) -> None:
        """Raise RuntimeError if a parameter given to the engine has another digest there. Warn once of those it cannot show."""
        held = {}
        for name in given:
            if (live := self.engine.read_back(name)) is not None:
                held[name] = digest(live.to(dtype_of(name, self.plan.dtype)) + 0.0, live.device)
        expected = dict(zip(given, read([*given.values()]), strict=True))
        for name, found in zip(held, read([*held.values()]), strict=True):
            if found != expected[name]:
                raise RuntimeError(f"version {version}: the engine's {name} is not what the learner sent")
        hidden = [name for name in given if name not in held]
        if hidden and not self._has_warned:
            print(
                f"warning: the engine cannot show {len(hidden)} of {len(self.plan.names)} parameters, "
                f"{hidden[0]} first. Their publishes are verified as they arrive and not as the engine holds "
                "them; watch training/rollout_probs_diff_mean.",
                file=sys.stderr,
                flush=True,
            )
            self._has_warned = True

    def _incoming(self, digests: list, given: dict) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter. For an engine with memory of its own, add the digests of what arrives, and
        of what the engine has to show. The latter take -0.0 as 0.0: it may hold weights in a form that knows only one zero."""
        kept = []
        shares = self._memory is not None
        for number, (name, value) in enumerate(self._arriving()):
            if not shares:
                digests.append(digest(value, self.device))
                given[name] = digest(self.engine.own_part(name, value) + 0.0, value.device)
            yield name, value
            if number >= len(self.plan.names) - self.plan.frozen:
                kept.append((name, value if shares else value.clone()))
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
        pins = is_accelerator(self.device) and not is_accelerator(self.bridge.device)

        def arrived() -> tuple[Bucket, torch.Tensor]:
            work, bucket, data = under_way.popleft()
            self._wait(work)
            self.received += data.nbytes
            return bucket, data if in_place or memory is None else bucket.of(memory).copy_(data)

        for bucket in self.plan.buckets:
            how = {"dtype": self.plan.dtype, "device": self.bridge.device, "pin_memory": pins}
            data = bucket.of(memory) if in_place else torch.empty(bucket.size, **how)
            under_way.append((self.bridge.broadcast(data), bucket, data))
            if len(under_way) == self.bridge.window:
                yield arrived()
        table = torch.empty(2 + len(self.plan.names), dtype=torch.long, device=self.bridge.device)
        self._table = self.bridge.broadcast(table), table  # the last message travels with the rest
        while under_way:
            yield arrived()

    def _wait(self, work) -> None:
        work.wait()
        watchdog.progress()

"""Weights from the learners to all generators: versioned, streamed over the bridge, and verified.

    learner:    publisher.publish(version, step)    takes a copy and returns; a thread sends it while training continues
    generator:  subscriber.receive(version)         between two engine steps

A publish is a stream of all parameters, end to end, which travels in pieces, and then the learner's digest of every parameter.
The generator compares it with the digest of the weights in its engine, and stops the job if one differs: weights that were not
updated are the silent fault of such systems.

Memory: a learner that sends holds one copy in the generators' precision, in host memory. A generator needs none, or if the
engine does not adopt memory, a few pieces (on the first rank of a node up to 32) and its largest parameter.
"""

import json
import math
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
import xxhash

from rl.background import in_background
from rl.generation.engine import Engine
from rl.learning.learner import Learner
from rl.model.attention import dtype_of
from rl.ranks import watchdog
from rl.ranks.device import is_accelerator, side_stream
from rl.split import Split

PIECE_BYTES = 32 << 20  # that travel at once; the next pieces are under way meanwhile
LEAST_BYTES = 1 << 20  # of a piece of a small model, of which four or more overlap


@dataclass(frozen=True)
class PublishPlan:
    """The parameters to send and their order, the same on both sides."""

    names: list[str]
    shapes: list[list[int]]
    dtype: torch.dtype
    frozen: int = 0  # the number of parameters at the end that never change: they are sent once

    @cached_property
    def offsets(self) -> list[int]:
        """The first element of each parameter in the stream, and the end of the last. One fp32 number takes two in bf16."""
        per = [dtype_of(name, self.dtype).itemsize // self.dtype.itemsize for name in self.names]
        return [0, *accumulate(n * math.prod(shape) for n, shape in zip(per, self.shapes, strict=True))]

    @cached_property
    def pieces(self) -> list[slice]:
        """The runs of the stream that travel one by one. They end anywhere, but never within an fp32 number."""
        end = self.offsets[-1]
        quarter = max(LEAST_BYTES, end * self.dtype.itemsize // 4)
        size = min(PIECE_BYTES, quarter) // self.dtype.itemsize // 32 * 32
        return [slice(start, min(start + size, end)) for start in range(0, end, size)]

    def view(self, number: int, run: torch.Tensor) -> torch.Tensor:
        """Return the parameter of this number, given its part of the stream."""
        return run.view(dtype_of(self.names[number], self.dtype)).view(self.shapes[number])

    def views(self, stream: torch.Tensor) -> list[torch.Tensor]:
        return [self.view(number, stream[a:b]) for number, (a, b) in enumerate(pairwise(self.offsets))]

    def arriving(self, pieces: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield each parameter as soon as the pieces have it whole. One that lies across a border is copied."""
        rest = []  # what has arrived behind the last parameter
        have = 0  # elements of it
        for number, (start, end) in enumerate(pairwise(self.offsets)):
            while have < end - start:
                rest.append(next(pieces))
                have += len(rest[-1])
            have -= end - start
            cut = len(rest[-1]) - have
            rest[-1], behind = rest[-1][:cut], [rest[-1][cut:]] if have else []
            value = torch.cat(rest) if len(rest) > 1 else rest[0]
            rest = behind  # before the engine works on the value: its pieces take no memory then
            yield self.view(number, value)
            del value

    def later(self) -> "PublishPlan":
        """Return the plan of all publishes after the first: its stream is the beginning of this one's."""
        trained = len(self.names) - self.frozen
        return replace(self, names=self.names[:trained], shapes=self.shapes[:trained], frozen=0) if self.frozen else self

    def to_json(self) -> str:
        return json.dumps([self.names, self.shapes, str(self.dtype).removeprefix("torch."), self.frozen])

    @staticmethod
    def from_json(text: str | bytes) -> "PublishPlan":
        names, shapes, dtype, frozen = json.loads(text)
        return PublishPlan(names, shapes, getattr(torch, dtype), frozen)


def digest(tensor: torch.Tensor, device: torch.device) -> int | torch.Tensor:
    """Return a 64-bit digest of the tensor's bits, for `read`: xxh3 on CPU machines; on accelerators a sum of the bits weighted
    by position, which they compute themselves."""
    flat = tensor.contiguous().view(-1)
    if not is_accelerator(device):
        value = xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy())
        return value - (1 << 64) if value >> 63 else value  # as an int64
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)
    total = torch.zeros((), dtype=torch.long, device=device)
    for start in range(0, len(bits), 1 << 24):
        run = bits[start : start + (1 << 24)].to(device).long()
        position = torch.arange(start, start + len(run), device=device)
        total += (run * (position % 65_521 * 2 + 1)).sum()  # modulo 2^64
    return total


def read(digests: list[int | torch.Tensor]) -> list[int]:
    """Return digests as integers that fit into a tensor. Those on a device come in one copy: each copy waits for the device."""
    return torch.stack(digests).tolist() if digests and isinstance(digests[0], torch.Tensor) else digests


class Publisher:
    """The learners' side. The learners that send have a copy; the others help to gather the shards."""

    def __init__(
        self, learner: Learner, split: Split, dtype: torch.dtype, announce: Callable[[int], None] = lambda version: None
    ):
        """announce: called with the version of each publish."""
        self._announce = announce
        self.split = split
        self.device = split.ranks.device
        self.learner = learner
        shapes = [list(parameter.shape) for parameter in learner.parameters.values()]
        self.plan = PublishPlan([*learner.parameters], shapes, dtype, len(learner.frozen))
        self._is_first = True
        self._sending: Future | None = None
        if split.bridge:
            self._stream = torch.empty(self.plan.offsets[-1], dtype=dtype, pin_memory=is_accelerator(self.device))
            split.store.set("weights/plan", self.plan.to_json())

    def publish(self, version: int, step: int = 0) -> None:
        """Publish the weights of that step as this version: wait until the previous publish has been sent, copy the weights,
        announce the version, and return while the copy is sent. A collective of the learners."""
        self.wait()
        if self._is_first and self.split.bridge:
            self.split.store.set("weights/first", str(version))
        self.take_copy()
        self.send(version, step)
        self._announce(version)

    def take_copy(self) -> None:
        """Copy the weights into the stream that is sent. A collective of the learners."""
        if not self._is_first:
            self.plan = self.plan.later()
        copies = self.plan.views(self._stream) if self.split.bridge else []
        for number, (_, tensor) in enumerate(self.learner.weights(self.plan.dtype, self.split.senders, self._is_first)):
            copies[number].copy_(tensor)
        self._is_first = False

    def send(self, version: int, step: int = 0) -> None:
        """Begin to send the copy, in the background."""
        if self.split.bridge:
            self._sending = in_background(partial(self._send, version, step), "publish")

    def wait(self) -> None:
        """Return when the last publish has been sent. Raise the error that stopped it, if any."""
        if self._sending:
            self._sending.result()
            self._sending = None

    def _send(self, version: int, step: int) -> None:
        bridge = self.split.bridge
        under_way = deque()

        def send(data: torch.Tensor) -> None:
            under_way.append((bridge.broadcast(data), data))
            if len(under_way) == bridge.window:
                under_way.popleft()[0].wait()
                watchdog.progress()

        with side_stream(self.device):
            digests = []
            for piece in self.plan.pieces:
                data = self._stream[piece].to(bridge.device)
                send(data)
                for number in range(len(digests), bisect_right(self.plan.offsets, piece.stop) - 1):  # while it travels
                    start, stop = self.plan.offsets[number : number + 2]
                    is_within = start >= piece.start
                    run = data[start - piece.start : stop - piece.start] if is_within else self._stream[start:stop]
                    digests.append(digest(self.plan.view(number, run), self.device))
            send(torch.tensor([version, step, *read(digests)]).to(bridge.device))
            for work, _ in under_way:
                work.wait()


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
        pieces = self._receiving()
        values = self.plan.arriving(data.to(self.device) for data in pieces)
        if self._memory is not None:
            deque(pieces, maxlen=0)  # waits for all
            values = self.plan.views(self._memory)
        yield from zip(self.plan.names, values, strict=True)
        next(pieces, None)  # lets it end behind the last piece

    def _receiving(self) -> Iterator[torch.Tensor]:
        """Yield the pieces as they arrive over the bridge. The next ones travel while one is used."""
        self.received = 0
        memory = self._memory
        under_way = deque()
        in_place = memory is not None and memory.device == self.bridge.device
        pins = is_accelerator(self.device) and not is_accelerator(self.bridge.device)

        def arrived() -> torch.Tensor:
            work, piece, data = under_way.popleft()
            self._wait(work)
            self.received += data.nbytes
            return data if in_place or memory is None else memory[piece].copy_(data)

        for piece in self.plan.pieces:
            how = {"dtype": self.plan.dtype, "device": self.bridge.device, "pin_memory": pins}
            data = memory[piece] if in_place else torch.empty(piece.stop - piece.start, **how)
            under_way.append((self.bridge.broadcast(data), piece, data))
            if len(under_way) == self.bridge.window:
                yield arrived()
        table = torch.empty(2 + len(self.plan.names), dtype=torch.long, device=self.bridge.device)
        self._table = self.bridge.broadcast(table), table  # the last message travels with the rest
        while under_way:
            yield arrived()

    def _wait(self, work) -> None:
        work.wait()
        watchdog.progress()

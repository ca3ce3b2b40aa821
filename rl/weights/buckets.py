"""The content of a publish, as both sides see it: a stream of all parameters, end to end, cut into buckets; and digests, by
which generators verify that they compute with the weights that the learners sent."""

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import xxhash

from rl.model.attention import dtype_of
from rl.ranks.device import is_accelerator

BUCKET_BYTES = 32 << 20  # that travel at once; the next buckets are under way meanwhile
LEAST_BYTES = 1 << 20  # of a bucket of a small model, of which four or more buckets overlap


@dataclass(frozen=True)
class Bucket:
    """A run of the stream: whole parameters, or a part of one that is larger than a bucket."""

    members: range  # parameters, by number
    start: int  # elements of the stream before it
    stop: int
    ends: bool  # whether its last parameter is complete with it

    @property
    def size(self) -> int:
        return self.stop - self.start

    def of(self, stream: torch.Tensor) -> torch.Tensor:
        return stream[self.start : self.stop]


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
    def buckets(self) -> list[Bucket]:
        quarter = max(LEAST_BYTES, self.offsets[-1] * self.dtype.itemsize // 4)
        limit = min(BUCKET_BYTES, quarter) // self.dtype.itemsize
        out = []
        first = 0
        for i in range(len(self.names)):
            start, stop = self.offsets[i], self.offsets[i + 1]
            if stop - self.offsets[first] > limit and first < i:
                out.append(Bucket(range(first, i), self.offsets[first], start, True))
                first = i
            if stop - start > limit:
                cuts = [*range(start, stop, limit), stop]
                out += [Bucket(range(i, i + 1), a, b, b == stop) for a, b in pairwise(cuts)]
                first = i + 1
        if first < len(self.names):
            out.append(Bucket(range(first, len(self.names)), self.offsets[first], self.offsets[-1], True))
        return out

    def views(self, run: torch.Tensor, members: range | None = None) -> list[torch.Tensor]:
        """Return views of the parameters `members`, by default all. run: a part of the stream that begins with the first."""
        members = range(len(self.names)) if members is None else members
        base = self.offsets[members.start]
        ends = self.offsets
        parts = ((i, run[ends[i] - base : ends[i + 1] - base]) for i in members)
        return [part.view(dtype_of(self.names[i], self.dtype)).view(self.shapes[i]) for i, part in parts]

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

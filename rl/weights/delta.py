"""The change between two publishes of the weights: the elements whose bits differ, and where they are.

An optimizer step of RL moves most weights by less than half the distance to their neighbour in bfloat16, so that few of the
elements that generators hold change (arXiv 2602.03839: 14 GB become 0.1 GB). A bucket's change is the gaps between its changed
elements, one or two bytes each, and their new values. A gap that is too long for that is cut at elements which are sent
although they have not changed: so every change can be written down, and taking it is one indexed copy.

What is compared are bits: 0.0 is not -0.0, and a NaN that stays the same is no change. A bucket is sent whole where its change
would take more than half of its bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

GAPS = {1: torch.uint8, 2: torch.int16}  # bytes of a gap -> its type
BITS = {2: torch.int16, 4: torch.int32}  # bytes of an element -> a type that compares bits
WORTH = 0.5  # of a bucket's bytes, up to which its change is sent in its place
ALIGN = 4  # bytes: where each part of a message begins
MESSAGE_BYTES = 32 << 20  # of changes that travel together


class Row(NamedTuple):
    """What is sent of a bucket. The table of all buckets' rows travels first."""

    width: int  # bytes of a gap; 0 where the bucket is sent whole
    count: int  # gaps, and values
    differing: int  # elements that have changed

    def sizes(self, itemsize: int) -> tuple[int, int]:
        """Bytes of the values, and of the gaps, in a message."""
        return tuple(-(-self.count * size // ALIGN) * ALIGN for size in (itemsize, self.width))


@dataclass(frozen=True)
class Change:
    """Some elements of a run: how far each is from the one before (the first: from the place before the run), and its value."""

    row: Row
    gaps: torch.Tensor | None = None  # [count] uint8 or int16
    values: torch.Tensor | None = None  # [count]

    @staticmethod
    def between(old: torch.Tensor, new: torch.Tensor) -> "Change":
        """old, new [n]: the run before and after."""
        bits = BITS[new.itemsize]
        changed = (old.view(bits) != new.view(bits)).nonzero().squeeze(1)  # ascending
        whole = Change(Row(0, 0, len(changed)))
        if len(changed) * (1 + new.itemsize) > WORTH * new.nbytes:
            return whole
        gaps = changed.diff(prepend=changed.new_tensor([-1]))
        cuts = {width: (gaps - 1) // torch.iinfo(dtype).max for width, dtype in GAPS.items()}  # elements that cut each gap
        cost = {width: (len(gaps) + int(cut.sum())) * (width + new.itemsize) for width, cut in cuts.items()}
        width = min(cost, key=cost.get)
        if cost[width] > WORTH * new.nbytes:
            return whole
        dtype, longest = GAPS[width], torch.iinfo(GAPS[width]).max
        ends = (1 + cuts[width]).cumsum(0)
        written = torch.full((int(ends[-1]) if len(ends) else 0,), longest, dtype=dtype, device=new.device)
        written[ends - 1] = (gaps - longest * cuts[width]).to(dtype)
        return Change(Row(width, len(written), len(changed)), written, new[_places(written)])

    def apply(self, run: torch.Tensor) -> None:
        """Makes the run, as it was before, what it is after."""
        run[_places(self.gaps.to(run.device))] = self.values.to(run.device)

    def parts(self) -> list[torch.Tensor]:
        """Its bytes in a message."""
        raw = [part.view(torch.uint8) for part in (self.values, self.gaps)]
        return [F.pad(part, (0, -len(part) % ALIGN)) for part in raw]


def _places(gaps: torch.Tensor) -> torch.Tensor:
    return gaps.cumsum(0, dtype=torch.long) - 1


def messages(rows: Sequence[Row], itemsize: int) -> Iterator[tuple[list[int], int]]:
    """(numbers of buckets, bytes of their changes) of each message, in the buckets' order, the same on both sides. A whole
    bucket travels alone, and has 0 bytes of changes; one in which nothing has changed is in no message."""
    together, size = [], 0
    for number, row in enumerate(rows):
        own = sum(row.sizes(itemsize))
        if together and (not row.width or size + own > MESSAGE_BYTES):
            yield together, size
            together, size = [], 0
        if not row.width:
            yield [number], 0
        elif own:
            together, size = [*together, number], size + own
    if together:
        yield together, size


def join(changes: Sequence[Change]) -> torch.Tensor:
    """The message of these changes, bytes."""
    return torch.cat([part for change in changes for part in change.parts()])


def split(message: torch.Tensor, rows: Sequence[Row], dtype: torch.dtype) -> Iterator[Change]:
    """The changes that `join` has put together."""
    for row, block in zip(rows, message.split([sum(row.sizes(dtype.itemsize)) for row in rows]), strict=True):
        values, gaps = block.split(row.sizes(dtype.itemsize))
        of_row = gaps[: row.count * row.width].view(GAPS[row.width]), values[: row.count * dtype.itemsize].view(dtype)
        yield Change(row, *of_row)

"""Images under sequence parallelism: the ranks that share a packed row also divide its images.

Each distinct image goes through the vision tower on one rank. An all-to-all then brings its features to the ranks whose pieces
of the row have the image's tokens, and their gradients back, so that neither the tower's work nor its memory is repeated. The
rest of the forward pass is that of any row (rl/model/vision_forward.py).

Left out: an image larger than a rank's memory, since an image stays on one rank.
"""

import dataclasses
import heapq
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor

from rl.model.vision_forward import RowImages, joined
from rl.ranks.dist import AllToAll


def divide(row: RowImages, ranks: int) -> list[list[int]]:
    """For each of this many ranks, the numbers of the distinct images that it prepares and computes: about as many patches."""
    patches = row.grid.prod(1).tolist()
    loads, out = [(0, rank) for rank in range(ranks)], [[] for _ in range(ranks)]
    for image in sorted(range(len(patches)), key=lambda i: (-patches[i], i)):
        load, rank = heapq.heappop(loads)
        out[rank].append(image)
        heapq.heappush(loads, (load + patches[image], rank))
    return [sorted(images) for images in out]


def part_of(row: RowImages, piece) -> RowImages:
    """The row's images for the rank that has this piece of it (rl/model/sequence_parallel.py): the images that it computes, and
    the places of its own tokens. A row without images stays as it is: every rank computes the empty image."""
    if not row.files:
        return row
    images_of = divide(row, piece.sharing)
    counts = row.token_counts
    begins = counts.cumsum(0) - counts
    source, local = (torch.empty(int(counts.sum()), dtype=torch.long) for _ in range(2))  # of each distinct feature
    for rank, images in enumerate(images_of):
        mine = joined(begins[i] + torch.arange(counts[i]) for i in images)
        source[mine], local[mine] = rank, torch.arange(len(mine))
    holder, source, local = row.places // piece.size, source[row.feature], local[row.feature]  # of each place, [m]
    me = piece.begin // piece.size
    given, taken = source == me, holder == me
    arriving = source[taken].argsort(stable=True)
    exchange = Exchange(
        give=local[given],
        sent=holder[given].bincount(minlength=piece.sharing).tolist(),
        received=source[taken].bincount(minlength=piece.sharing).tolist(),
        order=arriving.argsort(),
        group=piece.group,
    )
    return dataclasses.replace(
        row,
        grid=row.grid[images_of[me]],
        places=row.places[taken] - piece.begin,
        feature=row.feature[taken],
        files=[row.files[i] for i in images_of[me]],
        exchange=exchange,
    )


@dataclass(frozen=True, eq=False)
class Exchange:
    """Features of the images that this rank computes -> features of the image tokens in its piece of the row."""

    give: Tensor  # [s] which of this rank's features are sent, by rank
    sent: list[int]  # how many to each rank
    received: list[int]  # how many from each rank
    order: Tensor  # [m] of the piece's places, in order: which of the received rows is theirs
    group: torch.distributed.ProcessGroup

    def __call__(self, features: Tensor) -> Tensor:
        """[f, d] -> [m, d]. A collective of the ranks that share the row, in the backward pass too."""
        rows = features.index_select(0, self.give.to(features.device))
        return AllToAll.apply(rows, self.sent, self.received, self.group).index_select(0, self.order.to(features.device))

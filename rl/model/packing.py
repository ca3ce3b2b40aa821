"""Which tokens of a packed row a segment sees, and sequences of similar length side by side."""

import itertools

import numpy as np
import torch
from torch import Tensor

SIMILAR = 0.75  # sequences at least this fraction of the longest share a bucket: at most a third more cells than tokens


def in_buckets(begins: list[int], lengths: list[int]) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
    """Put sequences, which lie end to end, into buckets of similar length, the longest first. Return ([(numbers of its
    sequences [S], places of their tokens [S, L], which of these are real [S, L])], the cell of each token [K], with the buckets
    laid end to end)."""
    left = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    buckets = []
    done = 0
    cell_of = torch.empty(sum(lengths), dtype=torch.long)
    while left:
        longest = lengths[left[0]]
        members = [s for s in left if lengths[s] >= SIMILAR * longest]
        left = left[len(members) :]
        begin = torch.tensor([begins[s] for s in members])[:, None]  # [S, 1]
        length = torch.tensor([lengths[s] for s in members])[:, None]
        column = torch.arange(longest)[None]  # [1, L]
        cells = begin + torch.minimum(column, length - 1)  # padding repeats the last token, which is in bounds
        real = column < length
        cell_of[cells[real]] = done + torch.arange(cells.numel()).view_as(cells)[real]
        done += cells.numel()
        buckets.append((torch.tensor(members), cells, real))
    return buckets, cell_of


def tokens_seen(lengths: list[int], after: list[int]) -> list[np.ndarray]:
    """For each segment, the row's tokens that it attends to: those of the segment in front of it, then its own."""
    own = [np.arange(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(lengths)])]
    return [np.concatenate([own[before], own[i]]) if before >= 0 else own[i] for i, before in enumerate(after)]

"""A packed row as gated delta nets (delta_net.py) see it: its sequences, each with a convolution and a state of its own.

A segment begins with the last K - 1 inputs and the final state of the segment in front of it, so that the n responses to a
prompt share the prompt's computation, and autograd sums the gradients of its n copies.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.model.hybrid.rule import chunked, packed_rule, recurred_by, wide
from rl.model.packing import in_buckets


@dataclass(frozen=True)
class Wave:
    """Segments that are computed together: those that begin sequences, or those that continue them."""

    segments: list[int]
    tokens: Tensor  # [t] their places in the row, segment after segment
    ends: Tensor  # [S + 1] the segments' ends among these tokens, behind a 0
    front: Tensor | None  # [S] the segments of the wave before that they continue, by number; None if they begin sequences

    def recurred(self, rows: list[Tensor], start: Tensor | None) -> tuple[Tensor, Tensor]:
        """rows: of the wave's tokens, start [S, H, Dk, Dv] -> (outputs [t, H, Dv], final states [S, H, Dk, Dv])."""
        if rule := packed_rule(rows[0], rows[2]):
            return recurred_by(rule, rows, self.ends, start)
        outputs, states = [], []
        buckets, *orders = self._buckets
        for members, cells, real in buckets:
            cut = [x.flatten(1).index_select(0, cells.flatten()).view(*cells.shape, *x.shape[1:]) for x in rows]
            cut[3:] = [x * real[..., None] for x in cut[3:]]  # padding neither decays nor writes
            out, state = chunked(*cut, None if start is None else start.index_select(0, members))
            outputs.append(out.flatten(0, 1))
            states.append(state)
        return tuple(torch.cat(x).index_select(0, order) for x, order in zip((outputs, states), orders, strict=True))

    @functools.cached_property
    def _buckets(self) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor, Tensor]:
        """(for each bucket: see `in_buckets`; the place of each token's output, and of each segment's state, with the buckets
        end to end)."""
        device, (found, cell_of) = self.tokens.device, in_buckets(self.ends.tolist(), self.ends.diff().tolist())
        numbers = torch.cat([members for members, *_ in found])
        buckets = [tuple(x.to(device) for x in bucket) for bucket in found]
        return buckets, cell_of.to(device), numbers.argsort().to(device)


class Chain:
    """The segments of a packed row, end to end, some of them empty. after[i]: the segment that segment i continues, or -1."""

    def __init__(self, lengths: list[int], after: list[int], device: torch.device):
        self.lengths, self.after, self.device = lengths, after, device
        self.begins = [0, *itertools.accumulate(lengths)]
        self._halos_of: dict[int, tuple[Tensor, Tensor]] = {}

    def convolved(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, C], weight [C, K] -> [T, C]: over each token and the K - 1 before it in its sequence, or zeros."""
        source, place = self._halos(weight.shape[1] - 1)
        laid = torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, source)
        out = F.conv1d(laid.t()[None], weight[:, None], groups=len(weight))[0].t()
        return out.index_select(0, place)

    def _halos(self, size: int) -> tuple[Tensor, Tensor]:
        """(the row's tokens with `size` tokens in front of each segment, T for none; the place of each token's output)."""
        if size in self._halos_of:
            return self._halos_of[size]
        source = []
        place = []
        none = self.begins[-1]
        for i, before in enumerate(self.after):
            front = range(self.begins[before], self.begins[before + 1])[-size:] if before >= 0 else ()
            place += range(len(source), len(source) + self.lengths[i])
            source += [*[none] * (size - len(front)), *front, *range(self.begins[i], self.begins[i + 1])]
        self._halos_of[size] = torch.tensor(source).to(self.device), torch.tensor(place).to(self.device)
        return self._halos_of[size]

    def recurred(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """q, k [T, H, Dk], v [T, H, Dv], decay (its logarithm), beta [T, H] -> [T, H, Dv]."""
        outputs = []
        held = None
        waves, order = self._waves
        for wave in waves:
            start = None if wave.front is None else held.index_select(0, wave.front)
            out, held = wave.recurred([x.index_select(0, wave.tokens) for x in (q, k, v, decay, beta)], start)
            self.keep(layer, wave.segments, held)
            outputs.append(out)
        return torch.cat(outputs).index_select(0, order)

    def keep(self, layer: int, segments: list[int], states: Tensor) -> None:
        """Called with the final states [S, H, Dk, Dv] of each wave."""

    @functools.cached_property
    def _waves(self) -> tuple[list[Wave], Tensor]:
        """(the waves; [T] the place of each token's output, with the waves end to end)."""
        out = []
        tokens = []
        number = {}
        for continues in (False, True):
            segments = [i for i, before in enumerate(self.after) if (before >= 0) == continues and self.lengths[i]]
            if not segments:
                continue
            own = torch.cat([torch.arange(self.begins[i], self.begins[i + 1]) for i in segments])
            ends = torch.tensor([0, *itertools.accumulate(self.lengths[i] for i in segments)])
            front = torch.tensor([number[self.after[i]] for i in segments]).to(self.device) if continues else None
            number = {segment: place for place, segment in enumerate(segments)}
            out.append(Wave(segments, own.to(self.device), ends.to(self.device), front))
            tokens.append(own)
        return out, torch.cat(tokens).argsort().to(self.device)


class SharedChain:
    """A row that learners share (rl/model/sequence_parallel.py), as one rank's piece of t tokens: the rank takes some channels
    of the whole row for the convolution, and some heads for the states. piece: rl.model.sequence_parallel.Piece."""

    def __init__(self, piece):
        self.piece = piece
        self.row = piece.row.chain

    def convolved(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """x [t, C], weight [C, K] -> [t, C]."""
        own = weight.chunk(self.piece.sharing)[self.piece.begin // self.piece.size]
        return self.piece.back(self.row.convolved(layer, self.piece.whole(x), own))

    def recurred(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """q, k [t, H, Dk], v [t, H, Dv], decay, beta [t, H] -> [t, H, Dv]."""
        parts = (q, k, v, decay[..., None], beta[..., None])
        whole = self.piece.whole(torch.cat([wide(x) for x in parts], 2)).split([x.shape[2] for x in parts], 2)
        q, k, v, decay, beta = (x.to(given.dtype) for x, given in zip(whole, parts, strict=True))
        return self.piece.back(self.row.recurred(layer, q, k, v, decay[..., 0], beta[..., 0]))

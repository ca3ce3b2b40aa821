"""What gated delta nets (delta_net.py) see of a packed row: its sequences, each with a convolution and a state of its own.

A segment begins with the last K - 1 inputs and the final state of the segment in front of it, so that the n responses to a
prompt share what it computes, and autograd sums the gradients of its n copies. The rule is flash-linear-attention's where the
device has it (kernels.py), else our own (rule.py).
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.model.attention import of_similar_length
from rl.model.hybrid.kernels import packed_rule, recurred_by
from rl.model.hybrid.rule import chunked


@dataclass(frozen=True)
class Bucket:
    """Segments of similar length, which are computed at once."""

    segments: list[int]
    cells: Tensor  # [S, L] their tokens' places in the row; behind a segment's end its last token's
    real: Tensor  # [S, L]
    front: Tensor | None  # [S] the numbers, among the states so far, that they begin with; None where they begin a sequence


@dataclass(frozen=True)
class Wave:
    """Segments that a kernel takes in one call: those that begin sequences, or those that continue them."""

    segments: list[int]
    tokens: Tensor  # [t] their places in the row, segment after segment
    ends: Tensor  # [S + 1] the segments' ends among these tokens, behind a 0
    front: Tensor | None  # [S] the numbers, in the wave before, that they begin with; None where they begin a sequence


class Chain:
    """The segments of a packed row, end to end. after[i]: the segment that segment i continues, -1 for none; that one continues
    none itself. Segments may be empty."""

    def __init__(self, lengths: list[int], after: list[int], device: torch.device):
        self.lengths, self.after, self.device = lengths, after, device
        self.begins = [0, *itertools.accumulate(lengths)]
        self._halos_of: dict[int, tuple[Tensor, Tensor]] = {}

    def convolved(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, C], weight [C, K] -> [T, C]: of each token and the K - 1 before it in its sequence, or zeros."""
        source, place = self._halos(weight.shape[1] - 1)
        laid = torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, source)
        out = F.conv1d(laid.t()[None], weight[:, None], groups=len(weight))[0].t()
        return out.index_select(0, place)

    def _halos(self, size: int) -> tuple[Tensor, Tensor]:
        """(tokens of the row, T for none, each segment behind the `size` in front of it; where each token's output stands)."""
        if size in self._halos_of:
            return self._halos_of[size]
        source, place, none = [], [], self.begins[-1]
        for i, before in enumerate(self.after):
            front = range(self.begins[before], self.begins[before + 1])[-size:] if before >= 0 else ()
            place += range(len(source), len(source) + self.lengths[i])
            source += [*[none] * (size - len(front)), *front, *range(self.begins[i], self.begins[i + 1])]
        self._halos_of[size] = torch.tensor(source).to(self.device), torch.tensor(place).to(self.device)
        return self._halos_of[size]

    def recurred(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """q, k [T, H, Dk], v [T, H, Dv], decay (its logarithm), beta [T, H] -> [T, H, Dv]."""
        if rule := packed_rule(q, v):
            return self._recurred_by(rule, layer, q, k, v, decay, beta)
        outputs, states, held = [], [], None
        buckets, order = self._buckets
        for bucket in buckets:
            if bucket.front is not None and held is None:
                held = torch.cat(states)
            start = None if bucket.front is None else held.index_select(0, bucket.front)
            rows = [x.flatten(1).index_select(0, bucket.cells.flatten()) for x in (q, k, v, decay, beta)]
            rows = [row.view(*bucket.cells.shape, *x.shape[1:]) for row, x in zip(rows, (q, k, v, decay, beta), strict=True)]
            rows[3:] = [x * bucket.real[..., None] for x in rows[3:]]  # what pads neither decays nor writes
            out, state = chunked(*rows, start)
            self.keep(layer, bucket.segments, state)
            states += [state] if bucket.front is None else []
            outputs.append(out.flatten(0, 1))
        return torch.cat(outputs).index_select(0, order)

    def _recurred_by(self, rule: Callable, layer: int, *rows: Tensor) -> Tensor:
        """The same by a kernel that pads nothing: one call for what begins sequences, one for what continues them."""
        outputs, held = [], None
        waves, order = self._waves
        for wave in waves:
            start = None if wave.front is None else held.index_select(0, wave.front)
            out, states = recurred_by(rule, [x.index_select(0, wave.tokens) for x in rows], wave.ends, start)
            self.keep(layer, wave.segments, states)
            held = states if wave.front is None else held
            outputs.append(out)
        return torch.cat(outputs).index_select(0, order)

    def keep(self, layer: int, segments: list[int], states: Tensor) -> None:
        """Called with the final states [S, H, Dk, Dv] of each bucket of segments."""

    @functools.cached_property
    def _waves(self) -> tuple[list[Wave], Tensor]:
        """(the waves; [T] where each token's output stands, with the waves end to end)."""
        out, tokens, number = [], [], {}
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

    @functools.cached_property
    def _buckets(self) -> tuple[list[Bucket], Tensor]:
        """(the buckets, those that begin sequences first; [T] the cell of each token's output, with the buckets end to end)."""
        out, number, done = [], {}, 0  # number: segment -> that of its final state
        cell_of = torch.empty(self.begins[-1], dtype=torch.long)
        for continues in (False, True):
            segments = [i for i, before in enumerate(self.after) if (before >= 0) == continues and self.lengths[i]]
            for members, cells, real in of_similar_length(segments, self.begins, self.lengths):
                cell_of[cells[real]] = done + torch.arange(cells.numel()).view_as(cells)[real]
                done += cells.numel()
                front = torch.tensor([number[self.after[i]] for i in members]).to(self.device) if continues else None
                number |= {} if continues else {i: len(number) + n for n, i in enumerate(members)}
                out.append(Bucket(members, cells.to(self.device), real.to(self.device), front))
        return out, cell_of.to(self.device)

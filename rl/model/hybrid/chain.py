"""What gated delta nets (delta_net.py) see of a packed row: its sequences, each with a convolution and a state of its own.

A segment begins with the last K - 1 inputs and the final state of the segment in front of it, so that the n responses to a
prompt share what it computes, and autograd sums the gradients of its n copies. States and sums are fp32, rounded where
transformers rounds.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.model.attention import of_similar_length

CHUNK = 64  # tokens that one product takes, as in transformers: other borders would round otherwise
EPSILON = 1e-6  # in the norm of queries and keys


@dataclass(frozen=True)
class Bucket:
    """Segments of similar length, which are computed at once."""

    segments: list[int]
    cells: Tensor  # [S, L] their tokens' places in the row; behind a segment's end its last token's
    real: Tensor  # [S, L]
    front: Tensor | None  # [S] the numbers, among the states so far, that they begin with; None where they begin a sequence


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

    def keep(self, layer: int, segments: list[int], states: Tensor) -> None:
        """Called with the final states [S, H, Dk, Dv] of each bucket of segments."""

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


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gated delta rule a chunk at a time: q, k [S, L, H, Dk], v [S, L, H, Dv], decay, beta [S, L, H], start [S, H, Dk, Dv]
    or None for zeros -> (outputs [S, L, H, Dv], final states [S, H, Dk, Dv])."""
    given, length = q.dtype, q.shape[1]
    size = min(CHUNK, length)

    def cut(x: Tensor) -> Tensor:  # [S, L, H, ...] -> [S, H, chunks, size, ...]
        x = wide(x).transpose(1, 2)
        return F.pad(x, (0, 0) * (x.dim() - 3) + (0, -length % size)).unflatten(2, (-1, size))

    q, k, v, decay, beta = map(cut, (q, k, v, decay, beta))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    decay = decay.cumsum(-1)  # logarithm of what each token leaves of its chunk's first state
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighed = k * beta[..., None]
    wanted = torch.cat([v * beta[..., None], weighed * decay.exp()[..., None]], -1)
    system = weighed @ k.transpose(-1, -2) * between  # its diagonal counts as ones
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    writes, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside, q = q @ k.transpose(-1, -2) * between, q * decay.exp()[..., None]
    k, left = k * (decay[..., -1:] - decay).exp()[..., None], decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]) if start is None else start.to(q.dtype)
    out = []
    for n in range(q.shape[2]):
        new = writes[:, :, n] - reads[:, :, n] @ state
        out.append(q[:, :, n] @ state + inside[:, :, n] @ new)
        state = state * left[:, :, n] + k[:, :, n].transpose(-1, -2) @ new
    return torch.cat(out, 2)[:, :, :length].transpose(1, 2).to(given), state


def one_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The same for one token of A sequences: q, k [A, H, Dk], v [A, H, Dv], decay, beta [A, H], state [A, H, Dk, Dv], which is
    changed in place -> [A, H, Dv]."""
    given = q.dtype
    q, k, v, decay, beta = map(wide, (q, k, v, decay, beta))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    state.mul_(decay.exp()[..., None, None])
    new = (v - torch.einsum("ahkv,ahk->ahv", state, k)) * beta[..., None]
    state.add_(k[..., None] * new[..., None, :])
    return torch.einsum("ahkv,ahk->ahv", state, q).to(given)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

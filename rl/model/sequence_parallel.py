"""Sequence parallelism (Ulysses, arXiv 2309.14509): neighbouring learners share each packed micro-batch.

Every rank of such a group runs the model over its own piece of the packed row. Around attention the ranks trade: a rank that
has all heads of its piece gets some heads of the whole row, and back. Everything else in a decoder is computed token by token
and does not change. The log-probs are then gathered, and each rank of the group computes the loss of the whole micro-batch,
which may look at whole sequences. In the backward pass a rank keeps the gradient of its own tokens; gradients are sums over all
ranks anyway.

A rank computes the images whose tokens are in its piece. Left out: tensor parallelism, ring attention (docs/long-sequences.md
says why).
"""

import dataclasses
import functools
import math

import torch
import torch.distributed
import torch.nn.functional as F
from transformers import PretrainedConfig

from rl.errors import UserError
from rl.model.attention import Packed
from rl.ranks.dist import Ranks
from rl.ranks.gathering import AllToAll


def share_sequences(ranks: Ranks, size: int) -> Ranks:
    """The learners, of which every `size` neighbours share their micro-batches. Raises UserError if some are left over."""
    if ranks.world_size % size:
        raise UserError(
            f"--sequence-parallel {size} does not divide the {ranks.world_size} learners. Take a divisor of their number."
        )
    return dataclasses.replace(ranks, sequence_parallel=size)


def check_heads(config: PretrainedConfig, size: int) -> None:
    """Raise UserError for a model whose attention heads `size` ranks cannot share evenly."""
    text = config.get_text_config()
    given = f"--sequence-parallel {size}"
    heads = text.num_attention_heads
    kv = getattr(text, "num_key_value_heads", None) or heads
    if heads % size:
        raise UserError(f"{given}: between its ranks attention is split by heads, and the model has {heads}. Take a divisor.")
    if kv % size and size % kv:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
        raise UserError(
            f"{given}: the model has {kv} heads of keys and values, which its ranks can neither divide nor share evenly. Take "
            f"one of {', '.join(map(str, fitting))}."
        )


class Piece:
    """The layout of one rank's piece of a packed row: t of its T tokens. The last pieces may be partly or wholly padding."""

    def __init__(self, row: Packed, ranks: Ranks):
        self.row = row
        self.longest = row.longest
        self.sharing = ranks.sequence_parallel
        self.group = ranks.sequence_mesh.get_group("sequence")
        self.size = -(-row.tokens // self.sharing)  # t
        self.begin = ranks.rank % self.sharing * self.size
        self.tokens = min(max(row.tokens - self.begin, 0), self.size)  # without padding

    def of(self, x: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """[T, ...] -> [t, ...]: this rank's part, with `padding` behind the row's end."""
        own = x[self.begin : self.begin + self.size]
        return torch.cat([own, own.new_full((self.size - len(own), *own.shape[1:]), padding)])

    def attend(self, layer: int, query, key, value, scaling: float) -> torch.Tensor:
        """Causal attention within each sequence of the whole row. query [t, H, D]; key, value [t, H_kv, D]; -> [t, H, D]."""
        if (kv := key.shape[1]) < self.sharing:  # one for each rank; its queries all look at the same
            key, value = (x.repeat_interleave(self.sharing // kv, dim=1) for x in (key, value))
        by_rank = [x.unflatten(1, (self.sharing, -1)) for x in (query, key, value)]  # [t, ranks, heads, D]
        heads = [x.shape[2] for x in by_rank]
        whole = self.whole(torch.cat(by_rank, 2).flatten(1, 2))  # [T, this rank's heads, D]
        return self.back(self.row.attend(layer, *whole.split(heads, 1), scaling))

    @functools.cached_property
    def chain(self):
        """The piece as delta nets see it."""
        from rl.model.hybrid.chain import SharedChain

        return SharedChain(self)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """[t, ranks * n, ...] of each rank's piece -> [T, n, ...]: this rank's share of the whole row."""
        return self._trade(x.unflatten(1, (self.sharing, -1)).transpose(0, 1).flatten(0, 1))[: self.row.tokens]

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n, ...] of this rank -> [t, ranks * n, ...]."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, self.sharing * self.size - self.row.tokens))
        return self._trade(x).unflatten(0, (self.sharing, -1)).transpose(0, 1).flatten(1, 2)

    def _trade(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks * t, ...] -> the same shape: the i-th t rows go to rank i, and come from rank i."""
        rows = [self.size] * self.sharing
        return AllToAll.apply(x, rows, rows, self.group)


def part_of(micro, ranks: Ranks):
    """The MicroBatch with this rank's piece of its row. Its index is still that of all n tokens."""
    piece = Piece(micro.layout, ranks)
    own = torch.nonzero(micro.predict // piece.size == piece.begin // piece.size).squeeze(1)
    return dataclasses.replace(
        micro,
        inputs={name: _input_part(x, piece) for name, x in micro.inputs.items()},
        layout=piece,
        predict=micro.predict[own] - piece.begin,
        labels=micro.labels[own],
        routes=None if micro.routes is None else piece.of(micro.routes, -1),  # rl.model.router.UNKNOWN
        own=own,
        support=None if micro.support is None else micro.support[own],
    )


def _input_part(x, piece):
    """Cut one input of a model's forward: [1, T] -> [1, t], [3, 1, T] -> [3, 1, t], or the row's images."""
    if not isinstance(x, torch.Tensor):
        return x.within(piece.begin, piece.begin + piece.size)
    return piece.of(x.movedim(-1, 0)).movedim(0, -1)


def gather_log_probs(micro, ranks: Ranks, log_prob: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs and entropies of a rank's own tokens -> those of all n tokens of the micro-batch, [n] each, with gradient
    if they had one. log_prob [own tokens, m] becomes [n, m]."""
    group = ranks.sequence_mesh.get_group("sequence")
    rows = log_prob.view(len(log_prob), math.prod(log_prob.shape[1:])).t()  # [m, own tokens], of which there may be none
    every = _Gather.apply(torch.cat([rows, entropy[None]]), micro.own, len(micro.index), group)
    of_all = every[:-1].t().reshape(len(micro.index), *log_prob.shape[1:])
    entropies = every[-1]
    return of_all, entropies if entropy.requires_grad else entropies.detach()


class _Gather(torch.autograd.Function):
    """(values [k, own tokens], their places among n, n, group) -> [k, n]. The backward pass keeps the gradient of the own
    tokens: other ranks have computed the others, and keep theirs."""

    @staticmethod
    def forward(ctx, values, own, n: int, group):
        ctx.save_for_backward(own)
        out = values.new_zeros(len(values), n).index_copy(1, own, values)
        torch.distributed.all_reduce(out, group=group)  # a token is 0 on all ranks but one: nothing is rounded
        return out

    @staticmethod
    def backward(ctx, grad):
        (own,) = ctx.saved_tensors
        return grad.index_select(1, own), None, None, None

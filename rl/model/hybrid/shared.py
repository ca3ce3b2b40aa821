"""Gated delta nets where learners share a packed row (rl/model/sequence_parallel.py): a rank takes some channels of the whole
row for the convolution, and some heads for the states."""

import torch
from torch import Tensor

from rl.model.hybrid.rule import wide


class SharedChain:
    """What delta nets see of a rank's piece of t tokens. piece: rl.model.sequence_parallel.Piece."""

    def __init__(self, piece):
        self.piece, self.row = piece, piece.row.chain

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

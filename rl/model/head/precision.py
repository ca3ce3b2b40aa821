"""`--lm-head-fp32`: the product of hidden states with the output head in fp32, where the model computes in bf16.

Logits in bf16 have 8 significant bits, and generator and learner round them differently: MiniMax-M1 (arXiv 2506.13585) found
that this makes their probabilities differ, and ScaleRL (arXiv 2510.13786) adopts the remedy. Both sides use the bf16 weights.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Fp32Head:
    """A head whose product and gradients are fp32; gradients of its weights arrive in their own precision."""

    weight: Tensor  # [V, hidden]
    bias: Tensor | None  # [V]

    @staticmethod
    def of(head: nn.Linear) -> "Fp32Head":
        return Fp32Head(head.weight.float(), None if head.bias is None else head.bias.float())

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, hidden] in any precision -> logits [n, V]."""
        return F.linear(hidden.float(), self.weight, self.bias)

"""Weights from the learners to the engine in each learner's own process, as train_sync.py publishes them.

Parameters that are never trained (--freeze-vision-tower) are gathered from the learners once, with the first publish. An engine
that shows its own tensors gets these again; other engines take whole sets only, so a copy is kept in host memory for them.
"""

from collections.abc import Iterator

import torch

from rl.generation.engine import Engine
from rl.learning.learner import Learner
from rl.model.attention import dtype_of


class LocalWeights:
    """The learner's weights for the engine, in the precision `dtype`."""

    def __init__(self, learner: Learner, engine: Engine, dtype: torch.dtype):
        self.learner = learner
        self.engine = engine
        self.dtype = dtype
        self._kept: dict[str, torch.Tensor] | None = None  # the parameters never trained, after the first publish

    def publish(self, version: int) -> None:
        """Give the engine the learner's weights between two steps. A collective of the learners."""
        self.engine.update(self._weights(), version)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter."""
        kept = self._kept or {}
        is_first = self._kept is None
        for name, tensor in self.learner.weights(self.dtype, frozen=is_first):
            yield name, tensor
            if name in self.learner.frozen:
                shows_own = self.engine.shares_memory
                dtype = dtype_of(name, self.dtype)
                kept[name] = self.engine.read_back(name) if shows_own else tensor.to("cpu", dtype, copy=True)
        self._kept = kept
        if not is_first:
            yield from kept.items()

"""The prompts and responses of a run that has not been made: lengths, drawn from what is known of them."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

BLOCK = 1024  # tickets drawn at once


class Workload(Protocol):
    def group(self, ticket: int) -> tuple[int, list[int], bool]:
        """(prompt tokens, tokens of each response, whether their scores differ) of a ticket; the same at every call."""


@dataclass
class Drawn:
    """Log-normal lengths of mean and spread, cut at the longest one; sigma 0 gives all responses the mean.

    `mean` is that of the lengths before they are cut. A share `flat` of the groups has no signal."""

    n: int  # responses a prompt
    mean: float  # tokens of a response
    sigma: float  # of the logarithm
    longest: int
    prompt: int = 0  # tokens of a prompt
    flat: float = 0.0
    seed: int = 0
    _blocks: dict[int, tuple[list[list[int]], list[bool]]] = field(default_factory=dict, repr=False)

    def group(self, ticket: int) -> tuple[int, list[int], bool]:
        block, place = divmod(ticket, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
        lengths, signal = self._blocks[block]
        return self.prompt, lengths[place], signal[place]

    def _draw(self, block: int) -> tuple[list[list[int]], list[bool]]:
        random = np.random.default_rng((self.seed, block))
        logs = np.log(self.mean) - self.sigma**2 / 2 + self.sigma * random.standard_normal((BLOCK, self.n))
        lengths = np.clip(np.rint(np.exp(logs)), 1, self.longest).astype(int)
        return lengths.tolist(), (random.random(BLOCK) >= self.flat).tolist()

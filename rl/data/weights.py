"""The order of prompts whose files have weights: --train-files a.parquet:2 b.jsonl:1.

Of three tickets two are of a.parquet, however many rows it has. Of the first t tickets a file has its exact part of t, within
one: that is Tijdeman's answer to "the chairman assignment problem" (1980), which repeats itself after as many tickets as the
whole weights have in all. Each file is walked in an order of its own, again and again.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from rl.data.prompts import PromptOrder
from rl.errors import UserError

LONGEST = 100_000  # tickets until the files repeat themselves


class WeightedOrder(PromptOrder):
    """Ticket k is the next row of the file whose turn it is. An epoch has as many tickets as there are rows."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[Fraction], seed: int, shuffle: bool = True):
        """sizes: number of rows of each file. Raises UserError for weights of too many digits."""
        super().__init__(sum(sizes), seed, shuffle)
        whole = [weight * math.lcm(*(w.denominator for w in weights)) for weight in weights]
        self.weights = [int(weight) // math.gcd(*map(int, whole)) for weight in whole]
        if sum(self.weights) > LONGEST:
            shown = ", ".join(f"{float(weight):g}" for weight in weights)
            raise UserError(f"--train-files: the weights {shown} have too many digits. Give simpler ones: 0.33 for 1/3.")
        self._orders = [PromptOrder(size, f"{seed}/{file}", shuffle) for file, size in enumerate(sizes)]
        self._starts = [sum(sizes[:file]) for file in range(len(sizes))]
        self._turns = _turns(self.weights)

    def __call__(self, ticket: int) -> tuple[int, int]:
        period, place = divmod(ticket, len(self._turns))
        file, before = self._turns[place]
        _, row = self._orders[file](period * self.weights[file] + before)
        return ticket // self.num_prompts, self._starts[file] + row


def _turns(weights: Sequence[int]) -> list[tuple[int, int]]:
    """(file, how many turns it had before) for each turn of a period."""
    total = sum(weights)
    many = 2 * max(1, len(weights) - 1)
    counts = [0] * len(weights)
    turns = []
    for turn in range(1, total + 1):
        owed = [many * (weight * turn - count * total) for weight, count in zip(weights, counts, strict=True)]
        ready = [file for file, of_file in enumerate(owed) if of_file >= total]
        file = min(ready, key=lambda file: Fraction((many - 1) * total - owed[file], weights[file]))
        turns.append((file, counts[file]))
        counts[file] += 1
    return turns

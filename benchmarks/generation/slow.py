"""Environments for benchmarks/generation/episodes.py, which import nothing heavy."""

import random
import time


class Slow:
    """Each of its answers takes 0.5 to 3 seconds."""

    def reset(self, row, seed):
        self.random = random.Random(seed)

    def step(self, message):
        time.sleep(self.random.uniform(0.5, 3.0))
        return [{"role": "user", "content": "25"}], None, False


class Quick:
    """One turn, at once."""

    def step(self, message):
        return [], 1.0, True

"""A step's loss metrics, gathered from its micro-batches and updates."""

import torch

from rl.learning.batch import Batch, Tokens
from rl.ranks.dist import Ranks, all_reduce_sum


class LossMeans:
    """Sums over micro-batches, divided at the end, so that metrics do not depend on micro-batches and ranks. The loss's terms
    are means over the updates, each aggregated as the loss is; statistics are means over the trained tokens."""

    def __init__(self, batch: Batch, ranks: Ranks):
        self._batch, self._ranks = batch, ranks
        self.terms: dict[str, torch.Tensor] = {}
        self.stats: dict[str, torch.Tensor] = {}
        self.tokens = torch.zeros((), dtype=torch.float64)
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []  # (index, log-probs on the device) of the first update
        self._updates: list[dict[str, float]] = []  # what each optimizer step returned

    def add(self, t: Tokens, log_prob: torch.Tensor, terms: dict[str, torch.Tensor], stats: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch's log-probs [n]; terms, stats: see `gather`."""
        self.gather(t, terms, stats)
        if not self._updates:
            self._first.append((t.index, log_prob.detach()))

    def gather(self, t: Tokens, terms: dict[str, torch.Tensor], stats: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch's terms, name -> its share as a scalar, and stats, name -> [n]. Every rank adds the same names."""
        self.tokens = self.tokens + t.mask.sum()
        for name, value in terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + value.detach().double()
        for name, value in stats.items():
            total = torch.where(t.mask, value.detach(), 0.0).sum().double()
            self.stats[name] = self.stats.get(name, 0.0) + total

    def end_update(self, step: dict[str, float]) -> None:
        """Add what Learner.step returned."""
        self._updates.append(step)

    @property
    def first_log_prob(self) -> torch.Tensor:
        """[N] on the CPU: the log-probs of the first update, which are those of the policy that starts the step; NaN for tokens
        of later updates and outside the mask."""
        out = torch.full((len(self._batch.token),), torch.nan)
        for index, log_prob in self._first:
            out[index] = log_prob.cpu()
        return out

    def metrics(self) -> dict[str, float]:
        """Return actor/<name> -> mean, and the last update's actor/lr and actor/skipped_steps. A collective."""
        own = torch.stack([self.tokens, *self.terms.values(), *self.stats.values()]).cpu()  # the only wait for the device
        tokens, *sums = all_reduce_sum(own, self._ranks.data_group)
        updates = len(self._updates)
        over = [updates] * len(self.terms) + [max(1.0, float(tokens))] * len(self.stats)
        names = [*self.terms, *self.stats]
        out = {f"actor/{name}": float(total) / n for name, total, n in zip(names, sums, over, strict=True)}
        norms = [step["actor/grad_norm"] for step in self._updates]
        return self._updates[-1] | {"actor/grad_norm": sum(norms) / updates} | out

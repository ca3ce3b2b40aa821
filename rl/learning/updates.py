"""Around the updates of a step: the micro-batches that need no backward pass, and the step's loss metrics.

Responses whose advantages are all 0 train nothing, because their part of the loss and its gradient are 0. They only get the
forward pass, for the metrics: a third of the arithmetic. With a group-wise estimator these are all responses of flat groups,
whose scores are equal because the prompt is too easy or too hard: on many tasks half of a batch or more. They get separate
micro-batches if that saves time (`pack_apart` in rl/learning/division.py). The gradient is the same sum without its zeros,
equal up to rounding; metrics include all tokens. The loss's gradient is still computed up to the log-probs. If it is not 0
there, as in a custom script that trains all responses, the run ends with a message.
"""

import dataclasses

import torch

from rl.errors import UserError
from rl.learning.batch import Batch, MicroBatch, Tokens
from rl.ranks.dist import Ranks, all_reduce_sum


def forward_only(batch: Batch, micros: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
    """Return the micro-batches of each mini-batch, `forward_only` where no learner trains anything, except a mini-batch's last
    one: the optimizer needs a gradient, even of zeros, and FSDP frees what it has gathered in the backward pass. A
    collective."""
    trains = batch.trained & (batch.targets.advantage != 0)
    trained = [[int(trains[micro.index].count_nonzero()) for micro in of_mini] for of_mini in micros]
    totals = iter(all_reduce_sum(torch.tensor([n for of_mini in trained for n in of_mini[:-1]])).tolist())
    return [
        [*(dataclasses.replace(micro, forward_only=next(totals) == 0) for micro in of_mini[:-1]), *of_mini[-1:]]
        for of_mini in micros
    ]


def check_no_gradient(*xs: torch.Tensor) -> None:
    """Let log-probs and entropy [n] raise a UserError in the backward pass if the loss's gradient there is not 0."""
    for x in xs:
        x.requires_grad_().register_hook(_refuse)


def _refuse(grad: torch.Tensor) -> None:
    if grad.nan_to_num(nan=0.0).any():  # NaN comes from log-probs that are NaN, which are reported elsewhere
        raise UserError(
            "the loss trains responses whose advantages are all 0, but they have no backward pass. Take the line "
            "`micros = forward_only(batch, micros)` out of `learn`."
        )


class LossMeans:
    """Sums over micro-batches, divided at the end, so that metrics do not depend on micro-batches and ranks. The loss's terms
    are means over the updates, each aggregated as the loss is; statistics are means over the trained tokens."""

    def __init__(self, batch: Batch, ranks: Ranks):
        self._batch, self._ranks = batch, ranks
        self._terms: dict[str, torch.Tensor] = {}
        self._stats: dict[str, torch.Tensor] = {}
        self._trained = torch.zeros((), dtype=torch.float64)  # tokens
        self._computed = self._forward_only = 0  # tokens with a log-prob; those of them without a backward pass
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []  # (index, log-probs on the device) of the first update
        self._updates: list[dict[str, float]] = []  # what each optimizer step returned

    def add(self, t: Tokens, log_prob: torch.Tensor, terms: dict[str, torch.Tensor], stats: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch's log-probs [n]; terms, stats: see `gather`."""
        self.gather(t, terms, stats)
        if not self._updates:
            self._first.append((t.index, log_prob.detach()))

    def gather(self, t: Tokens, terms: dict[str, torch.Tensor], stats: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch's terms, name -> its share as a scalar, and stats, name -> [n]. Every rank adds the same names."""
        self._trained = self._trained + t.mask.sum()
        self._computed += len(t.index)
        self._forward_only += len(t.index) * t.forward_only
        for name, value in terms.items():
            self._terms[name] = self._terms.get(name, 0.0) + value.detach().double()
        for name, value in stats.items():
            total = torch.where(t.mask, value.detach(), 0.0).sum().double()
            self._stats[name] = self._stats.get(name, 0.0) + total

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
        """Return actor/<name> -> mean, the last update's actor/lr and actor/skipped_steps, and perf/forward_only, the part of
        the tokens without a backward pass. A collective."""
        own = torch.stack([self._trained, *self._terms.values(), *self._stats.values()]).cpu()  # the only wait for the device
        own = torch.cat([own.new_tensor([self._computed, self._forward_only]), own])
        computed, forward_only, trained, *sums = all_reduce_sum(own, self._ranks.data_group).tolist()
        updates = len(self._updates)
        over = [updates] * len(self._terms) + [max(1.0, trained)] * len(self._stats)
        names = [*self._terms, *self._stats]
        out = {f"actor/{name}": total / n for name, total, n in zip(names, sums, over, strict=True)}
        norms = [step["actor/grad_norm"] for step in self._updates]
        out |= {"actor/grad_norm": sum(norms) / updates, "perf/forward_only": forward_only / max(1.0, computed)}
        return self._updates[-1] | out

"""--sft-files: each optimizer step also imitates demonstrations, by a term with a separate coefficient and denominator.

    loss = policy loss + sft_coef * mean over the demonstrations' trained tokens of -log p

Demonstrations are packed separately: no baseline, denominator or metric of the policy's samples counts them. Left out: weights
that depend on a demonstration's likelihood, as in LUFFY (arXiv 2504.14945) and CHORD (arXiv 2508.11408); images.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

import losses
from rl.algorithm import whole_batch
from rl.data.prompts import PromptOrder
from rl.learning.batch import Batch
from rl.learning.division import Division
from rl.learning.micro_batches import Tokens, micro_batches
from rl.samples.group import Group, Response


class Imitation:
    """The demonstrations of a run, and the position of the next ones."""

    def __init__(self, args, rows: Sequence):
        """args: a script's flags; rows: rl.data.demonstrations.Demonstrations."""
        self.args = args
        self.rows = rows
        self.order = PromptOrder(len(rows), args.seed, args.data.shuffle)
        minis = -(-args.schedule.prompts_per_step // args.schedule.prompts_per_update)
        self.updates = args.learner.ppo_epochs * minis  # in a step
        self.begin_step(1)

    def begin_step(self, step: int) -> None:
        """step: from 1. The demonstrations only depend on it."""
        self._next = (step - 1) * self.updates * self.args.imitation.sft_batch_size
        self.losses: list[float] = []  # of this step's updates

    def batch(self, learner) -> Batch:
        """Return the demonstrations of the next update."""
        tickets = range(self._next, self._next + self.args.imitation.sft_batch_size)
        self._next = tickets.stop
        division = Division(len(tickets), self.args.learner.max_tokens_per_micro_batch, learner.ranks)
        return Batch.of(to_groups(self.rows, {ticket: self.order(ticket)[1] for ticket in tickets}), division)

    def imitate(self, learner) -> dict[str, float]:
        """Add the gradient of the next demonstrations' term to that of an update. Return actor/sft_nll, the mean of -log p over
        their tokens, averaged over the step's updates so far. A collective of the learners."""
        batch = self.batch(learner)
        found = []
        every = torch.arange(len(batch.lengths))
        denominator = whole_batch.denominator(batch, every, "token-mean", 0)  # trained tokens of all ranks
        for micro in micro_batches(batch, every, self.args.learner.max_tokens_per_micro_batch, learner.ranks):
            t = Tokens.of(batch, micro)
            log_prob = learner.forward(micro).log_prob
            nll = losses.aggregate(-log_prob, t.mask, t.seq, "token-mean", denominator)
            (self.args.imitation.sft_coef * nll).backward()
            found.append(nll.detach())
        total = torch.stack(found).cpu().double().sum()
        self.losses.append(float(whole_batch.sum_over_ranks(batch, total)))
        return {"actor/sft_nll": sum(self.losses) / len(self.losses)}


def to_groups(rows: Sequence, indices: Mapping[int, int]) -> list[Group]:
    """Convert rows of rl.data.demonstrations.Demonstrations to groups, which a learner takes: all tokens before the first
    trained one are the prompt. indices: ticket -> row."""
    return [_to_group(ticket, rows, index) for ticket, index in indices.items()]


def _to_group(ticket: int, rows: Sequence, index: int) -> Group:
    ids, trained = rows[index]
    first = int(trained.argmax())
    unknown = np.zeros(len(ids) - first, np.int32)
    response = Response(ids[first:], unknown.astype(np.float32), unknown, "stop", mask=trained[first:])
    return Group(ticket, ids[:first], "sft", [response])

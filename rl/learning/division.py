"""The division of a batch among the learners: who trains which responses, in which micro-batches.

Every learner knows the length, the score and the group of each response, so all make the same plan without communication. Each
only holds the tokens of its own responses, and what is computed from them: memory falls with the number of learners. Left out:
quantities of the whole batch (rl/algorithm/whole_batch.py).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from rl.ranks.dist import Ranks

Plan = list[list[list[int]]]  # [rank][micro-batch] -> sequences
OF_BACKWARD = 2 / 3  # of a micro-batch's arithmetic
A_PASS = 1024  # fixed cost of a micro-batch, in tokens
WORTH_IT = 0.95  # of the time of packing all together; above it they are packed together


def pack(lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int], max_tokens: int, ranks: int) -> Plan:
    """Split sequences into micro-batches of at most `max_tokens` tokens, the same number on every rank.

    lengths: tokens of each sequence; prompts: how many of them are its prompt's, which a micro-batch computes once for all
    responses to it; groups: neighbours of one group share a prompt. Return [rank][micro-batch] -> indices into `lengths`. The
    same input gives the same plan on every rank. Raise ValueError for a sequence above max_tokens.

    Runs of one group are placed, longest first, each into the emptiest bin (Graham's rule, at most 4/3 of the optimum); the
    number of micro-batches grows until the budget holds. Long runs share their prompt, short ones balance better. So several
    plans are made, with runs of up to a micro-batch, and of a whole, a half and a quarter of a micro-batch's average load, and
    the one that computes the fewest tokens is chosen, counting that all ranks wait for the slowest.
    """
    if max(lengths, default=0) > max_tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit in a micro-batch of {max_tokens}")
    row = partial(_row_tokens, lengths=lengths, prompts=prompts, groups=groups)
    plans = []
    once = row(range(len(lengths)))
    for part in (0, 1, 2, 4):
        bins = _place(lengths, groups, max_tokens, ranks, part)
        slowest = sum(max(map(row, bins[first : first + ranks])) for first in range(0, len(bins), ranks))
        plans.append((slowest, len(bins), part, bins))
        if slowest * ranks == once:  # nothing is computed twice, and no rank waits
            break
    *_, bins = min(plans)
    return [[sorted(members) for members in bins[rank::ranks]] for rank in range(ranks)]


def pack_apart(
    lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int], flat: Sequence[bool], max_tokens: int, ranks: int
) -> Plan:
    """Pack as `pack` does, but put `flat` sequences into separate micro-batches, before the others, if that saves time because
    they only need a forward pass. At least one micro-batch, which may be empty, is for the others."""
    together = pack(lengths, prompts, groups, max_tokens, ranks)
    if not any(flat):
        return together
    parts = []
    for kind in (True, False):
        members = [i for i, is_flat in enumerate(flat) if is_flat == kind]
        plan = pack(*([of[i] for i in members] for of in (lengths, prompts, groups)), max_tokens, ranks)
        parts.append([[[members[i] for i in micro] for micro in of_rank] for of_rank in plan])
    row = partial(_row_tokens, lengths=lengths, prompts=prompts, groups=groups)

    def cost(plan: Plan) -> int:
        return A_PASS * len(plan[0]) + sum(max(map(row, of_ranks)) for of_ranks in zip(*plan, strict=True))

    forward_only, both_ways = map(cost, parts)
    if forward_only * (1 - OF_BACKWARD) + both_ways >= WORTH_IT * cost(together):
        return together
    return [first + second for first, second in zip(*parts, strict=True)]


def _place(lengths: Sequence[int], groups: Sequence[int], max_tokens: int, ranks: int, part: int) -> list[list[int]]:
    """Return the bins of a plan, each rank's side by side. part: of a bin's average load, for the longest run; 0 for all."""
    count = max(1, -(-sum(lengths) // (max_tokens * ranks)))
    while True:
        runs = _runs(lengths, groups, sum(lengths) / (part * count * ranks) if part else max_tokens)
        loads = [sum(lengths[i] for i in run) for run in runs]
        heap = [(0, b) for b in range(count * ranks)]
        bins: list[list[int]] = [[] for _ in heap]
        for r in sorted(range(len(runs)), key=lambda r: (-loads[r], r)):
            load, b = heapq.heappop(heap)
            bins[b] += runs[r]
            heapq.heappush(heap, (load + loads[r], b))
        if max(load for load, _ in heap) <= max_tokens:
            return bins
        count += max(1, count // 32)  # do not try thousands of bins one by one


def _runs(lengths: Sequence[int], groups: Sequence[int], limit: float) -> list[list[int]]:
    """Group neighbours of one group into runs of up to `limit` tokens; a longer sequence is a run of its own."""
    runs = []
    load = 0
    for i, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        if i and groups[i - 1] == group and load + length <= limit:
            runs[-1].append(i)
            load += length
        else:
            runs.append([i])
            load = length
    return runs


def _row_tokens(members: Sequence[int], lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int]) -> int:
    """Return the tokens of a micro-batch's row, with each prompt once."""
    return sum(lengths[i] - prompts[i] for i in members) + sum({groups[i]: prompts[i] for i in members}.values())


@dataclass(frozen=True)
class Division:
    """The division of a batch among learners: each mini-batch of `prompts` prompts separately, into micro-batches. Each batch
    has its own Division, which plans a mini-batch once and keeps the plan."""

    prompts: int
    max_tokens: int  # of a micro-batch on one rank
    ranks: Ranks
    packs_flat_apart: bool = False  # groups with equal scores have micro-batches of their own
    _plans: dict[tuple, Plan] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(args, learner) -> "Division":
        """args: a script's."""
        tokens = args.learner.max_tokens_per_micro_batch
        return Division(args.schedule.prompts_per_update, tokens, learner.ranks, args.packs_flat_apart)

    def owners(self, lengths: Sequence[int], prompts: Sequence[int], group: Tensor, flat: Sequence[bool]) -> list[int]:
        """Return the data rank that trains each response; the same on every rank. lengths [B]: prompt and response tokens;
        prompts [B]: prompt tokens; group [B]; flat [B]: whether to pack it apart."""
        out = [0] * len(lengths)
        for mini in mini_batches(group, int(group[-1]) + 1 if len(group) else 0, self.prompts):
            for rank, micros in enumerate(self.micros(lengths, prompts, group, flat, mini)):
                for i in mini[[i for micro in micros for i in micro]].tolist():
                    out[i] = rank
        return out

    def micros(
        self, lengths: Sequence[int], prompts: Sequence[int], group: Tensor, flat: Sequence[bool], members: Tensor
    ) -> Plan:
        """Return each data rank's micro-batches of the responses `members` [b], as indices into `members`; the same number on
        every rank. lengths, prompts, group, flat: as in `owners`."""
        own = members.tolist()
        rows = tuple(tuple(of[i] for i in own) for of in (lengths, prompts, group.tolist(), flat))
        if rows not in self._plans:
            self._plans[rows] = pack_apart(*rows, self.max_tokens * self.ranks.sequence_parallel, self.ranks.data_size)
        return self._plans[rows]


def mini_batches(group: Tensor, count: int, prompts: int) -> list[Tensor]:
    """Return the responses [b] of each run of `prompts` groups. group [B]: numbers below `count`."""
    return [torch.nonzero(group // prompts == k).squeeze(1) for k in range(-(-count // prompts))]

"""One step's batch: groups as the tensors that a learner computes on, and its division among the learners.

Every learner knows the length, the score and the group of each response, so all make the same plan (`Division`) without
communication. `Batch` has these of all responses of a step, and the tokens of those that this learner trains, end to end:
memory falls with the number of learners. Its `Targets` are what `learn` computes from them: first what models say,
then what the whole batch says (rl/algorithm/whole_batch.py).

`MicroBatch` is the input of one forward pass: whole sequences, packed without padding, each prompt once. `Tokens` are a batch
and its targets at the tokens of a micro-batch: what `actor_loss` computes on.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rl.model.attention import Packed
from rl.ranks.device import moved
from rl.ranks.dist import Ranks
from rl.samples.group import Group, Response

if TYPE_CHECKING:
    from rl.learning.batch_images import BatchImages


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
    def of(args, learner) -> Division:
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


@dataclass
class TopTokens:
    """A teacher's K most likely tokens in the place of each token, in host memory (--teacher-top-k)."""

    token: torch.Tensor  # [N, K] int32
    log_prob: torch.Tensor  # [N, K] float32, the teacher's


@dataclass
class Targets:
    """The inputs of a batch's loss, in the order in which `learn` computes them: CPU tensors [N], like the batch's."""

    actor_log_prob: torch.Tensor | None = None  # float32, of the policy that starts the step; NaN if unknown
    old_log_prob: torch.Tensor | None = None  # float32, the ratio's denominator; None: the update's own policy
    ref_log_prob: torch.Tensor | None = None  # float32
    teacher_log_prob: torch.Tensor | None = None  # float32
    teacher_top: TopTokens | None = None  # with --teacher-top-k
    value: torch.Tensor | None = None  # float32, of the critic, before the update
    is_weight: torch.Tensor | None = None  # float32, weight of the rollout correction
    rejected: torch.Tensor | None = None  # bool, tokens that the rollout correction excludes from the loss
    kl: torch.Tensor | None = None  # float32, the penalty in the reward, before its coefficient
    reward: torch.Tensor | None = None  # float32, the score on the last token, less KL penalties
    advantage: torch.Tensor | None = None  # float32
    chosen: torch.Tensor | None = None  # bool, tokens that clip_cov and kl_cov choose
    returns: torch.Tensor | None = None  # float32, the critic's targets


@dataclass
class Batch:
    """B responses; CPU tensors.

    Tensors per response, [B], are the same on every learner. Tensors per token, [N], hold the responses that this learner
    trains: all of them if it is alone. A response's tokens are contiguous, and responses are in order. Responses that could not
    be scored are left out: they have no part in the loss, its denominators or any baseline.
    """

    tickets: list[int]  # of its groups, including one whose responses all failed to be scored
    unscored: int  # responses left out
    errors: list[str]  # why responses could not be scored
    prompts: list[np.ndarray]  # B prompts, as token ids
    lengths: torch.Tensor  # [B] long, tokens of each response
    sampled_lengths: torch.Tensor  # [B] long, tokens of each response in the mask
    group: torch.Tensor  # [B] long, which prompt: the group's place in the batch
    score: torch.Tensor  # [B] float32
    baseline: torch.Tensor  # [B] float32, score of the greedy response to the same prompt (ReMax)
    extra: list[dict[str, float]]  # B dicts of further numbers of the reward function
    truncated: torch.Tensor  # [B] bool, the response was cut at its budget
    token: torch.Tensor  # [N] int32
    seq: torch.Tensor  # [N] long, the response each token belongs to
    mask: torch.Tensor  # [N] bool, tokens that the policy sampled and that may be trained
    rollout_log_prob: torch.Tensor  # [N] float32
    version: torch.Tensor  # [N] int32
    local_lengths: torch.Tensor  # [B] long, tokens of each response among the N: lengths, or 0
    division: Division | None  # among the learners; None: all tokens are here
    flat: list[bool]  # B, whether the group is flat; all False if flat groups are not packed apart
    routes: list[np.ndarray | None]  # B responses' routes, as in their records
    prompt_routes: list[np.ndarray | None]  # B prompts' routes
    sources: list[str]  # of its groups: their data sources
    sizes: list[int]  # of its groups: their responses, scored or not
    histories: list[list[int] | None]  # B, as in their records
    support: torch.Tensor | None  # [N, K] int32, tokens that could be sampled (rl/model/sampling_mask.py)
    images: BatchImages | None = None  # of its prompts, if the model takes images
    targets: Targets = field(default_factory=Targets)

    @staticmethod
    def of(groups: list[Group], division: Division | None = None) -> Batch:
        """Make the batch of the groups, in ticket order. division: among the learners; None: this one trains all."""
        groups = sorted(groups, key=lambda g: g.ticket)
        pairs = [(i, g, r) for i, g in enumerate(groups) for r in g.scored]
        lengths = torch.tensor([len(r.token_ids) for _, _, r in pairs], dtype=torch.long)
        group = torch.tensor([i for i, _, _ in pairs], dtype=torch.long)
        is_flat = [division is not None and division.packs_flat_apart and g.is_flat for g in groups]
        flat = [is_flat[i] for i, _, _ in pairs]
        here = lengths
        responses = [r for _, _, r in pairs]
        is_part = division is not None and division.ranks.data_size > 1
        if is_part:
            prompts = [len(g.prompt_ids) for _, g, _ in pairs]
            owners = division.owners([p + n for p, n in zip(prompts, lengths.tolist(), strict=True)], prompts, group, flat)
            own = [i for i, owner in enumerate(owners) if owner == division.ranks.data_rank]
            here = torch.zeros_like(lengths)
            responses = [responses[i] for i in own]
            here[own] = lengths[own]
        masks = (np.ones(len(r.token_ids), bool) if r.mask is None else r.mask for r in responses)
        joined = lambda arrays, dtype: torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]))  # noqa: E731
        return Batch(
            tickets=[g.ticket for g in groups],
            unscored=sum(len(g.responses) for g in groups) - len(pairs),
            errors=[r.error for g in groups for r in g.responses if r.error is not None],
            prompts=[g.prompt_ids for _, g, _ in pairs],
            lengths=lengths,
            sampled_lengths=torch.tensor([r.sampled for _, _, r in pairs], dtype=torch.long),
            group=group,
            score=torch.tensor([r.score for _, _, r in pairs], dtype=torch.float32),
            baseline=torch.tensor([g.baseline for _, g, _ in pairs], dtype=torch.float32),
            extra=[r.extra for _, _, r in pairs],
            truncated=torch.tensor([r.finish_reason == "length" for _, _, r in pairs], dtype=torch.bool),
            token=joined((r.token_ids for r in responses), np.int32),
            seq=torch.arange(len(pairs)).repeat_interleave(here),
            mask=joined(masks, bool),
            rollout_log_prob=joined((r.log_probs for r in responses), np.float32),
            version=joined((r.versions for r in responses), np.int32),
            local_lengths=here,
            division=division if is_part else None,
            flat=flat,
            routes=[r.routes for _, _, r in pairs],
            prompt_routes=[g.prompt_routes for _, g, _ in pairs],
            sources=[g.data_source for g in groups],
            sizes=[len(g.responses) for g in groups],
            histories=[r.histories for _, _, r in pairs],
            support=_supports(responses) if any(r.support is not None for r in responses) else None,
        )

    @property
    def is_unscored(self) -> bool:
        """Whether no response could be scored."""
        return bool(self.errors) and not len(self.score)

    @property
    def ranks(self) -> Ranks | None:
        """The learners that hold the other tokens; None if all are here."""
        return self.division and self.division.ranks

    @property
    def is_masked(self) -> bool:
        """Whether a response has tokens that the policy did not sample. The same on every learner."""
        return not torch.equal(self.lengths, self.sampled_lengths)

    @property
    def trained(self) -> torch.Tensor:
        """[N] bool: the tokens of the mask that the rollout correction keeps in the loss."""
        return self.mask if self.targets.rejected is None else self.mask & ~self.targets.rejected

    @property
    def starts(self) -> torch.Tensor:
        """[B]: index of each response's first token in the [N] tensors."""
        return self.local_lengths.cumsum(0) - self.local_lengths

    def mini_batches(self, prompts: int) -> list[torch.Tensor]:
        """Return the responses [b] of each mini-batch of `prompts` prompts, in ticket order."""
        return mini_batches(self.group, len(self.tickets), prompts)

    @property
    def total_lengths(self) -> list[int]:
        """Prompt plus response tokens of each response."""
        return [len(p) + n for p, n in zip(self.prompts, self.lengths.tolist(), strict=True)]

    @property
    def prompt_lengths(self) -> list[int]:
        """Prompt tokens of each response."""
        return [len(p) for p in self.prompts]

    def distinct_prompts(self) -> list[np.ndarray]:
        """Return the prompt of each group that has a response."""
        _, first = np.unique(self.group.numpy(), return_index=True)
        return [self.prompts[i] for i in first]


def _supports(responses: list[Response]) -> torch.Tensor:
    from rl.model import sampling_mask  # late: only --keep-sampling-mask needs it

    return sampling_mask.of_responses([r.support for r in responses], [len(r.token_ids) for r in responses])


@dataclass
class MicroBatch:
    """Whole responses, packed, each prompt once: T tokens, of which n, the response tokens in the mask, need log-probs."""

    inputs: dict[str, torch.Tensor]  # of the model's forward, on the device: input_ids and position_ids [1, T]
    layout: Packed
    predict: torch.Tensor  # [n] on the device: position in the row of the hidden state that predicts each token
    labels: torch.Tensor  # [n] on the device
    index: torch.Tensor  # [n] on the CPU: the same tokens' indices in the batch's [N] tensors
    routes: torch.Tensor | None = None  # [T, L, K] int16 on the CPU: the experts to be replayed (rl/model/router.py)
    own: torch.Tensor | None = None  # if the row is shared: which of the n tokens predict and labels belong to, on the device
    forward_only: bool = False  # nothing in it trains (whole_batch.forward_only)
    has_responses: bool = True  # False for a rank without work
    support: torch.Tensor | None = None  # [n, K] on the device: tokens that could be sampled in place of labels

    @property
    def real_tokens(self) -> int:
        """Tokens of the row on this rank, without padding; 0 for a rank without work."""
        return self.layout.tokens if self.has_responses else 0

    @staticmethod
    def of(batch: Batch, responses: list[int], device: torch.device) -> MicroBatch:
        """Pack the given responses with their prompts. An empty list gives one sequence of one token with nothing to predict: a
        rank without work still takes part in the collectives of its forward and backward pass."""
        index = tokens_of(batch, torch.tensor(responses, dtype=torch.long))
        if not responses:
            layout = Packed([1], device)
            nothing = torch.zeros(0, dtype=torch.long)
            inputs = layout.inputs(torch.zeros(1, dtype=torch.long))
            if batch.images:
                inputs |= batch.images.inputs([1], [-1], [None], device)
            return MicroBatch(inputs, layout, nothing.to(device), nothing.to(device), nothing, has_responses=False)
        # The row's segments: (tokens, the preceding segment or -1, whose it is: of a group, or (response, number of the
        # history)). prompt_of: by group.
        segments = []
        begins = []
        prompt_of = {}
        for i, tokens in zip(responses, batch.token[index].split(batch.lengths[responses].tolist()), strict=True):
            group = int(batch.group[i])
            if group not in prompt_of:
                prompt_of[group] = len(segments)
                segments.append((torch.from_numpy(batch.prompts[i].astype(np.int32)), -1, group))
            tokens, *apart = tokens.split(batch.histories[i] or len(tokens))  # apart: with their own prompts
            segments.append((tokens, prompt_of[group], (i, 0)))
            segments += [(history, -1, (i, number)) for number, history in enumerate(apart, 1)]
            begins += [len(batch.prompts[i]) - 1, *[-1] * len(apart)]
        parts, after, owners = map(list, zip(*segments, strict=True))
        sizes = [len(part) for part in parts]
        layout = Packed(sizes, device, after)
        sequences = layout.gather_index.split(layout.lengths)  # each response follows its prompt
        # a prompt's last token predicts its response's first; a separate history has its own prompt
        before = [s[begin:-1] if begin >= 0 else s.roll(1) for begin, s in zip(begins, sequences, strict=True)]
        inputs = layout.inputs(torch.cat(parts).long())
        if batch.images:
            inputs |= batch.images.inputs(sizes, after, owners, device)
        predict = torch.cat(before)
        mask = batch.mask[index]
        if not mask.all():
            predict = predict[mask]
            index = index[mask]
        labels = moved(batch.token[index].long(), device=device)
        micro = MicroBatch(inputs, layout, moved(predict, device=device), labels, index)
        if batch.support is not None:
            micro.support = moved(batch.support[index].long(), device=device)
        if any(rows is not None for rows in [*batch.prompt_routes, *batch.routes]):
            from rl.model.router import row_of_routes  # late: only a mixture with --router-replay needs it

            micro.routes = row_of_routes(batch, responses)
        return micro


Micros = Sequence[Sequence[MicroBatch]]  # of each mini-batch


def micro_batches(batch: Batch, members: torch.Tensor, max_tokens: int, ranks: Ranks) -> list[MicroBatch]:
    """Pack this rank's part of the responses `members` [b]. Every rank gets the same number of micro-batches, first those with
    flat groups only. max_tokens: of a micro-batch on one rank."""
    own = plan_of(batch, members, max_tokens, ranks)[ranks.data_rank]
    return [micro_batch(batch, members[part].tolist(), ranks) for part in own]


def plan_of(batch: Batch, members: torch.Tensor, max_tokens: int, ranks: Ranks) -> Plan:
    """Return all ranks' micro-batches of the responses `members` [b], as indices into `members`."""
    division = Division(len(batch.tickets), max_tokens, ranks)
    if batch.division and (batch.division.max_tokens, batch.ranks) == (max_tokens, ranks):
        division = batch.division  # it has planned this already
    return division.micros(batch.total_lengths, batch.prompt_lengths, batch.group, batch.flat, members)


def micro_batch(batch: Batch, responses: list[int], ranks: Ranks) -> MicroBatch:
    """Pack the given responses: this rank's part of the row."""
    micro = MicroBatch.of(batch, responses, ranks.device)
    if ranks.sequence_parallel == 1:
        return micro
    from rl.model.sequence_parallel import part_of  # late: few runs share sequences

    return part_of(micro, ranks)


def tokens_of(batch: Batch, responses: torch.Tensor) -> torch.Tensor:
    """Return the indices in the [N] tensors of all tokens of the given responses [b], in that order. All must be here."""
    lengths = batch.lengths[responses]
    starts = batch.starts[responses]
    if not torch.equal(lengths, batch.local_lengths[responses]):
        raise ValueError("the batch was divided differently: tokens of a response are not on this learner")
    ends = lengths.cumsum(0)
    offset = torch.arange(int(ends[-1]) if len(ends) else 0)
    return offset + (starts - (ends - lengths)).repeat_interleave(lengths)


@dataclass
class Tokens:
    """A batch and its targets at the n tokens of a micro-batch, on its device: [n] each, None if `learn` computes none."""

    index: torch.Tensor  # on the CPU: their places in the batch's [N] tensors
    mask: torch.Tensor  # bool, the tokens that are trained (Batch.trained)
    seq: torch.Tensor
    token: torch.Tensor
    version: torch.Tensor
    rollout_log_prob: torch.Tensor
    old_log_prob: torch.Tensor | None
    ref_log_prob: torch.Tensor | None
    teacher_log_prob: torch.Tensor | None
    teacher_top_token: torch.Tensor | None  # [n, K] int32
    teacher_top_log_prob: torch.Tensor | None  # [n, K]
    value: torch.Tensor | None
    is_weight: torch.Tensor | None
    advantage: torch.Tensor | None
    chosen: torch.Tensor | None
    returns: torch.Tensor | None
    forward_only: bool  # of the micro-batch

    @staticmethod
    def of(batch: Batch, micro: MicroBatch) -> Tokens:
        def here(whole: torch.Tensor | None) -> torch.Tensor | None:
            return None if whole is None else moved(whole[micro.index], device=micro.labels.device)

        targets = batch.targets
        of_batch = ("seq", "token", "version", "rollout_log_prob")
        computed = ("old_log_prob", "ref_log_prob", "teacher_log_prob", "value", "is_weight", "advantage", "chosen", "returns")
        return Tokens(
            index=micro.index,
            mask=here(batch.trained),
            teacher_top_token=here(targets.teacher_top and targets.teacher_top.token),
            teacher_top_log_prob=here(targets.teacher_top and targets.teacher_top.log_prob),
            forward_only=micro.forward_only,
            **{name: here(getattr(batch, name)) for name in of_batch},
            **{name: here(getattr(targets, name)) for name in computed},
        )

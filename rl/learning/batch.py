"""Turns groups into the tensors that a learner computes on.

`Batch` has the scores of all responses of a step, and the tokens of those that this learner trains (rl/learning/division.py),
end to end. Its `Targets` are what `learn` computes from them. `MicroBatch` is the input of one forward pass: whole sequences,
packed without padding. `Tokens` are a batch and its targets at the tokens of a micro-batch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed

from rl.learning.division import Division, mini_batches
from rl.model.attention import Packed
from rl.ranks.device import moved
from rl.ranks.dist import Ranks, all_gather_bytes, all_reduce_sum
from rl.samples.group import Group, Response

if TYPE_CHECKING:
    from rl.learning.batch_images import BatchImages

PIECE = 1 << 17  # tokens computed at once in passes over all of them: what a processor's cache holds


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
    errors: list[str]  # why responses could not be scored, including those kept by --on-reward-error zero
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
    failed: torch.Tensor  # [B] bool, not scored, counts as 0 (--on-reward-error zero)
    sources: list[str]  # of its groups: their data sources
    sizes: list[int]  # of its groups: their responses, scored or not
    turn_rewards: list[list | None]  # B responses' rewards of turns, as in their records
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
            failed=torch.tensor([r.error is not None for _, _, r in pairs], dtype=torch.bool),
            sources=[g.data_source for g in groups],
            sizes=[len(g.responses) for g in groups],
            turn_rewards=[r.rewards for _, _, r in pairs],
            histories=[r.histories for _, _, r in pairs],
            support=_supports(responses) if any(r.support is not None for r in responses) else None,
        )

    @property
    def is_unscored(self) -> bool:
        """Whether no response could be scored."""
        return bool(self.errors) and len(self.errors) == self.unscored + len(self.score)

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

    def by_response(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [N] over each response's tokens here: [B] float64."""
        if not len(x):
            return torch.zeros(len(self.local_lengths), dtype=torch.float64)
        return torch.segment_reduce(x.double(), "sum", lengths=self.local_lengths)

    def token_reward(self) -> torch.Tensor:
        """Return [N]: each response's score on its last token, 0 elsewhere. With --turn-rewards, each turn's reward is on the
        turn's last token, and only the rest of the score on the last one."""
        reward = torch.zeros(len(self.token))
        ends = self.local_lengths.cumsum(0)[self.local_lengths > 0] - 1
        reward[ends] = self.score[self.local_lengths > 0]
        starts = self.starts.tolist()
        for i in [i for i, rewards in enumerate(self.turn_rewards) if rewards and self.local_lengths[i]]:
            for token, value in self.turn_rewards[i]:
                reward[starts[i] + int(self.lengths[i]) - 1] -= value
                reward[starts[i] + token] += value
        return reward

    def mini_batches(self, prompts: int) -> list[torch.Tensor]:
        """Return the responses [b] of each mini-batch of `prompts` prompts, in ticket order."""
        return mini_batches(self.group, len(self.tickets), prompts)

    def total_lengths(self) -> list[int]:
        """Prompt plus response tokens of each response."""
        return [len(p) + n for p, n in zip(self.prompts, self.lengths.tolist(), strict=True)]

    def prompt_lengths(self) -> list[int]:
        """Prompt tokens of each response."""
        return [len(p) for p in self.prompts]

    def distinct_prompts(self) -> list[np.ndarray]:
        """Return the prompt of each group that has a response."""
        _, first = np.unique(self.group.numpy(), return_index=True)
        return [self.prompts[i] for i in first]

    def tokens_of(self, responses: torch.Tensor) -> torch.Tensor:
        """Return the indices in the [N] tensors of all tokens of the given responses [b], in that order. All must be here."""
        lengths = self.lengths[responses]
        starts = self.starts[responses]
        if not torch.equal(lengths, self.local_lengths[responses]):
            raise ValueError("the batch was divided differently: tokens of a response are not on this learner")
        ends = lengths.cumsum(0)
        offset = torch.arange(int(ends[-1]) if len(ends) else 0)
        return offset + (starts - (ends - lengths)).repeat_interleave(lengths)

    def span(self, responses: torch.Tensor) -> slice:
        """Return the slice of the [N] tensors with the tokens of consecutive responses [b], such as a mini-batch's."""
        if not len(responses):
            return slice(0, 0)
        ends = torch.tensor([int(responses[0]), int(responses[-1]) + 1])
        return slice(*torch.searchsorted(self.seq, ends).tolist())

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the learners' values in place. A collective of the learners that share the batch."""
        return all_reduce_sum(x, self.ranks.data_group) if self.ranks else x

    def of_each_rank(self, values: object) -> list:
        """Gather a value, which JSON must be able to hold, from each of those learners, in their order. A collective."""
        if not self.ranks:
            return [values]
        return [json.loads(record) for record in all_gather_bytes(json.dumps(values).encode(), self.ranks.data_group)]

    def at(self, micro: MicroBatch) -> Tokens:
        """Return the batch and its targets at the micro-batch's tokens."""
        return Tokens.of(self, micro)


def _supports(responses: list[Response]) -> torch.Tensor:
    from rl.model import sampling_mask  # late: only --keep-sampling-mask needs it

    return sampling_mask.of_responses([r.support for r in responses], [len(r.token_ids) for r in responses])


def pieces(seq: torch.Tensor) -> Iterator[slice]:
    """Divide seq [N], ascending, into slices of whole responses, of at most PIECE tokens unless a response has more."""
    start = 0
    while start < len(seq):
        stop = min(len(seq), start + PIECE)
        if stop < len(seq):  # start of the response that would be cut; its end, if it is the piece's first
            first = int(torch.searchsorted(seq, seq[stop]))
            stop = first if first > start else int(torch.searchsorted(seq, seq[start], right=True))
        yield slice(start, stop)
        start = stop


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
    forward_only: bool = False  # nothing in it trains (rl/learning/updates.py)
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
        index = batch.tokens_of(torch.tensor(responses, dtype=torch.long))
        if not responses:
            layout = Packed([1], device)
            nothing = torch.zeros(0, dtype=torch.long)
            inputs = layout.inputs(torch.zeros(1, dtype=torch.long))
            if batch.images:
                inputs |= batch.images.inputs([1], [-1], [-1], device)
            return MicroBatch(inputs, layout, nothing.to(device), nothing.to(device), nothing, has_responses=False)
        # The row's segments: (tokens, the preceding segment or -1, a prompt's group or -1). prompt_of: by group.
        segments = []
        begins = []
        prompt_of = {}
        for i, tokens in zip(responses, batch.token[index].split(batch.lengths[responses].tolist()), strict=True):
            group = int(batch.group[i])
            if group not in prompt_of:
                prompt_of[group] = len(segments)
                segments.append((torch.from_numpy(batch.prompts[i].astype(np.int32)), -1, group))
            tokens, *apart = tokens.split(batch.histories[i] or len(tokens))  # apart: with their own prompts
            segments += [(tokens, prompt_of[group], -1), *((history, -1, -1) for history in apart)]
            begins += [len(batch.prompts[i]) - 1, *[-1] * len(apart)]
        parts, after, groups = map(list, zip(*segments, strict=True))
        sizes = [len(part) for part in parts]
        layout = Packed(sizes, device, after)
        sequences = layout.gather_index.split(layout.lengths)  # each response follows its prompt
        # a prompt's last token predicts its response's first; a separate history has its own prompt
        before = [s[begin:-1] if begin >= 0 else s.roll(1) for begin, s in zip(begins, sequences, strict=True)]
        inputs = layout.inputs(torch.cat(parts).long())
        if batch.images:
            inputs |= batch.images.inputs(sizes, after, groups, device)
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


@dataclass
class Forward:
    """The policy's forward pass over a micro-batch, float32, on its device."""

    log_prob: torch.Tensor  # [n], of the tokens, with gradient
    entropy: torch.Tensor  # [n]
    top_log_prob: torch.Tensor | None = None  # [n, K], of the teacher's most likely tokens, with gradient


def micro_batches(batch: Batch, members: torch.Tensor, max_tokens: int, ranks: Ranks) -> list[MicroBatch]:
    """Pack this rank's part of the responses `members` [b]. Every rank gets the same number of micro-batches, first those with
    flat groups only. max_tokens: of a micro-batch on one rank."""
    division = Division(len(batch.tickets), max_tokens, ranks)
    if batch.division and (batch.division.max_tokens, batch.ranks) == (max_tokens, ranks):
        division = batch.division  # it has planned this already
    plan = division.micros(batch.total_lengths(), batch.prompt_lengths(), batch.group, batch.flat, members)
    micros = (MicroBatch.of(batch, members[part].tolist(), ranks.device) for part in plan[ranks.data_rank])
    return [part_of(micro, ranks) if ranks.sequence_parallel > 1 else micro for micro in micros]


def part_of(micro: MicroBatch, ranks: Ranks) -> MicroBatch:
    """Return the micro-batch with this rank's piece of its row. Its index is still that of all n tokens."""
    from rl.model.sequence_parallel import Piece  # late: only --sequence-parallel needs it

    piece = Piece(micro.layout, ranks)
    own = torch.nonzero(micro.predict // piece.size == piece.begin // piece.size).squeeze(1)
    return dataclasses.replace(
        micro,
        inputs={name: _input_part(x, piece) for name, x in micro.inputs.items()},
        layout=piece,
        predict=micro.predict[own] - piece.begin,
        labels=micro.labels[own],
        routes=None if micro.routes is None else piece.of(micro.routes, -1),  # rl.model.router.UNKNOWN
        own=own,
        support=None if micro.support is None else micro.support[own],
    )


def _input_part(x, piece):
    """Cut one input of a model's forward: [1, T] -> [1, t], [3, 1, T] -> [3, 1, t], or the row's images."""
    if not isinstance(x, torch.Tensor):
        return x.within(piece.begin, piece.begin + piece.size)
    return piece.of(x.movedim(-1, 0)).movedim(0, -1)

"""The micro-batches of a batch: what one forward pass takes in, and the batch at its tokens.

`MicroBatch` is the input of one forward pass: whole sequences, packed without padding, each prompt once. `Tokens` are a batch
and its targets at the tokens of a micro-batch: what `actor_loss` computes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl.learning.batch import Batch, Division, Plan
from rl.model.attention import Packed
from rl.ranks.device import moved
from rl.ranks.dist import Ranks


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

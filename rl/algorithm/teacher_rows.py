"""A teacher that reads the policy's responses after different prompts (--teacher-prompt).

Each micro-batch becomes rows of the same responses after the teacher's prompts. If these are the policy's, it is one row with
the same bits; if they are longer, there are as many rows as the size of a micro-batch requires. A single response that exceeds
it is computed anyway: a pass without gradient takes less memory than the update. Left out: agents, whose later conversations
hold the policy's prompt.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rl.learning.batch import Batch, MicroBatch, part_of
from rl.learning.division import pack
from rl.model.head.log_probs import TopTokens


class TeacherRows:
    def __init__(self, ids_of: Callable[[int, list[int]], Sequence[int]]):
        """ids_of: (ticket, token ids of the policy's prompt) -> token ids of the teacher's prompt."""
        self._ids_of = ids_of

    def log_probs(self, learner, batch: Batch, micros: Sequence[Sequence[MicroBatch]]) -> torch.Tensor:
        """Return the teacher's log-probs [N] of the tokens that this rank trains, on the CPU; 0 outside the mask. Its top
        tokens, if they are compared, are stored in the micro-batches. A collective of the learners."""
        out, every = torch.zeros(len(batch.token)), [*itertools.chain.from_iterable(micros)]
        taught, limit = self._with_its_prompts(batch), learner.micro_batch_tokens * learner.ranks.sequence_parallel
        parts = [_parts(taught, micro, limit) for micro in every]
        counts = zip(*batch.of_each_rank([len(rows) for rows in parts]), strict=True)
        for micro, its_parts, count in zip(every, parts, map(max, counts), strict=True):
            tops = []
            for part in [*its_parts, *[[]] * (count - len(its_parts))]:  # the same number of passes on every rank
                row = MicroBatch.of(taught, part, learner.ranks.device)
                row = part_of(row, learner.ranks) if learner.ranks.sequence_parallel > 1 else row
                out[row.index] = learner.read_by_teacher(row).cpu()
                tops.append((row.index, row.top))
            micro.top = _joined(tops) if learner.teacher_top_k else None
        learner.teacher.reshard()
        return out

    def _with_its_prompts(self, batch: Batch) -> Batch:
        """Return the batch with the teacher's prompts for the responses that are here."""
        prompts, of_group = [*batch.prompts], {}
        for i in torch.nonzero(batch.local_lengths).flatten().tolist():
            group = int(batch.group[i])
            if group not in of_group:
                of_group[group] = np.array(self._ids_of(batch.tickets[group], batch.prompts[i].tolist()), np.int32)
            prompts[i] = of_group[group]
        nothing = [None] * len(prompts)
        return dataclasses.replace(batch, prompts=prompts, routes=nothing, prompt_routes=nothing)


def _parts(taught: Batch, micro: MicroBatch, limit: int) -> list[list[int]]:
    """Divide the micro-batch's responses into rows of up to `limit` tokens, or of one response that has more."""
    responses = taught.seq[micro.index].unique().tolist()
    prompts = [len(taught.prompts[i]) for i in responses]
    lengths = [prompt + int(taught.lengths[i]) for prompt, i in zip(prompts, responses, strict=True)]
    (rows,) = pack(lengths, prompts, taught.group[responses].tolist(), max([limit, *lengths]), 1)
    return [[responses[i] for i in row] for row in rows]


def _joined(tops: list[tuple[torch.Tensor, TopTokens]]) -> TopTokens:
    """Join the top tokens of rows, each with its index, in the order of their micro-batch's tokens."""
    order = torch.cat([index for index, _ in tops]).argsort()
    return TopTokens(*(torch.cat([getattr(top, name) for _, top in tops])[order] for name in ("token", "of_teacher")))

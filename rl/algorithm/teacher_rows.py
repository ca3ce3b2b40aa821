"""A teacher that reads the policy's responses after different prompts (--teacher-prompt).

Each micro-batch becomes a row of its responses after the teacher's prompts: the same bits if these are the policy's. Longer
prompts make the row longer than a micro-batch may be: a token takes less memory than in the update, but nothing limits their
number. Left out: agents, whose later conversations hold the policy's prompt.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from rl.learning.batch import Batch, MicroBatch, part_of
from rl.ranks.dist import Ranks


class TeacherRows:
    def __init__(self, ids_of: Callable[[int, list[int]], Sequence[int]]):
        """ids_of: (ticket, token ids of the policy's prompt) -> token ids of the teacher's prompt."""
        self._ids_of = ids_of

    def rows(self, batch: Batch, micros: Sequence[Sequence[MicroBatch]], ranks: Ranks) -> Iterator[MicroBatch]:
        """Yield each micro-batch's responses after the teacher's prompts."""
        taught = self._with_its_prompts(batch)
        for micro in itertools.chain.from_iterable(micros):
            row = MicroBatch.of(taught, batch.seq[micro.index].unique().tolist(), ranks.device)
            yield part_of(row, ranks) if ranks.sequence_parallel > 1 else row

    def _with_its_prompts(self, batch: Batch) -> Batch:
        """Return the batch with the teacher's prompts for the responses that are here."""
        prompts = [*batch.prompts]
        of_group = {}
        for i in torch.nonzero(batch.local_lengths).flatten().tolist():
            group = int(batch.group[i])
            if group not in of_group:
                of_group[group] = np.array(self._ids_of(batch.tickets[group], batch.prompts[i].tolist()), np.int32)
            prompts[i] = of_group[group]
        nothing = [None] * len(prompts)
        return dataclasses.replace(batch, prompts=prompts, routes=nothing, prompt_routes=nothing)

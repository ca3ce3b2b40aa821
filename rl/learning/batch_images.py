"""The images of a learner's batch. Samples travel without pixels: each learner reads the rows of its own micro-batches again,
and a thread prepares the next micro-batch's images while the current one is computed.

Memory: the files of this rank's rows for a step, and the pixels that rl/data/image_prompts.py keeps.
"""

import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from rl.data.image_prompts import Images
from rl.data.prompts import PromptDataset, PromptOrder
from rl.model.vision_forward import RowImages, row_inputs
from rl.ranks.dist import Ranks
from rl.samples.group import Group

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="images")  # its errors are raised where the pixels are used


class BatchImages:
    """Images by group, and the packed rows that have images, in the order in which they are computed."""

    def __init__(self, prompts: PromptDataset, order: PromptOrder, groups: Sequence[Group], ranks: Ranks | None = None):
        """ranks: the learners, if several share a row."""
        self.prompts, self.order = prompts, order
        self._sharing = ranks.sequence_parallel if ranks else 1
        self._place = ranks.rank % self._sharing if ranks else 0  # among the ranks that share a row
        self.groups = sorted(groups, key=lambda group: group.ticket)
        self._read = functools.cache(self._read_again)
        self._rows: list[RowImages] = []

    def inputs(self, lengths: Sequence[int], after: Sequence[int], groups: Sequence[int], device: torch.device) -> dict:
        """Return a packed row's inputs in addition to its ids (rl/model/vision_forward.py). lengths, after: of its segments;
        groups: the place in the batch of each segment that is a prompt, -1 for the others."""
        inputs = row_inputs(lengths, after, [None if group < 0 else self._read(group) for group in groups])
        row = inputs["images"]
        if row.files:
            number = len(self._rows)
            row = dataclasses.replace(row, taken=lambda: self._prepare(number + 1))
            size = -(-sum(lengths) // self._sharing)  # as of rl.model.sequence_parallel.Piece
            self._rows.append(row.within(self._place * size, (self._place + 1) * size))
            if not number:
                self._prepare(0)
        return {"position_ids": inputs["position_ids"].to(device), "images": row}

    def _prepare(self, number: int) -> None:
        """Let the thread prepare that row's images. The first row follows the last: rows are computed several times."""
        for images, file in self._rows[number % len(self._rows)].files:
            _THREAD.submit(images.pixels_of, file)

    def _read_again(self, number: int) -> Images | None:
        """Return the images of a group's prompt. Raise RuntimeError if the row differs from the generator's."""
        group = self.groups[number]
        prompt = self.prompts[self.order(group.ticket)[1]]
        digest = prompt.images.digest if prompt.images else ""
        if digest != group.images or not np.array_equal(prompt.ids, group.prompt_ids):
            raise RuntimeError(
                f"{prompt.where}: the prompt or its images are not what the generator of ticket {group.ticket} had. All ranks "
                "must see the same files, and these must not change during a run."
            )
        return prompt.images

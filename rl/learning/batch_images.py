"""The images of a learner's batch. Samples travel without those of the data: each learner reads the rows of its own
micro-batches again. What an environment has shown comes with the sample. A thread prepares the next micro-batch's images while
the current one is computed.

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
from rl.samples.group import Group, Response

Owner = int | tuple[int, int] | None  # of a segment: the place of the prompt's group; a response and the number of its history

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="images")  # its errors are raised where the pixels are used


class BatchImages:
    """Images by group, and the packed rows that have images, in the order in which they are computed."""

    def __init__(self, prompts: PromptDataset, order: PromptOrder, groups: Sequence[Group], ranks: Ranks | None = None):
        """ranks: the learners, if several share a row."""
        self.prompts, self.order = prompts, order
        self._sharing = ranks.sequence_parallel if ranks else 1
        self._place = ranks.rank % self._sharing if ranks else 0  # among the ranks that share a row
        self.groups = sorted(groups, key=lambda group: group.ticket)
        self._responses = [response for group in self.groups for response in group.scored]
        self._of = functools.cache(self._read)
        self._rows: list[RowImages] = []

    def inputs(self, lengths: Sequence[int], after: Sequence[int], owners: Sequence[Owner], device: torch.device) -> dict:
        """Return a packed row's inputs besides its ids (rl/model/vision_forward.py). The lists are of its segments."""
        inputs = row_inputs(lengths, after, [self._of(owner) for owner in owners])
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

    def _read(self, owner: Owner) -> Images | None:
        """Return the images of a segment."""
        if owner is None:
            return None
        if isinstance(owner, tuple):
            response = self._responses[owner[0]]
            return self._shown(response, owner[1]) if response.images else None
        group = self.groups[owner]
        if group.image_files:
            places = np.flatnonzero(group.prompt_ids == self.prompts.prep.image_token)
            return self._over(group.prompt_ids, places, group.image_files)
        return self._read_again(group) if group.images else None

    def _shown(self, response: Response, history: int) -> Images | None:
        """Return the images that an environment has shown in a history of the response: its tokens are not sampled."""
        ends = np.cumsum([0, *(response.histories or [len(response.token_ids)])])
        part = slice(ends[history], ends[history + 1])
        is_image = (response.token_ids == self.prompts.prep.image_token) & ~response.mask
        begins = np.flatnonzero(is_image & ~np.insert(is_image[:-1], 0, False))  # two images have text between them
        files = [file for file, at in zip(response.images, begins, strict=True) if part.start <= at < part.stop]
        return self._over(response.token_ids[part], np.flatnonzero(is_image[part]), files) if files else None

    def _over(self, ids: np.ndarray, places: np.ndarray, files: Sequence[np.ndarray]) -> Images:
        return self.prompts.prep.over(ids, places, [file.tobytes() for file in files])

    def _read_again(self, group: Group) -> Images | None:
        """Return the images of the data for a group's prompt. Raise RuntimeError if the row differs from the generator's."""
        prompt = self.prompts[self.order(group.ticket)[1]]
        digest = prompt.images.digest if prompt.images else ""
        if digest != group.images or not np.array_equal(prompt.ids, group.prompt_ids):
            raise RuntimeError(
                f"{prompt.where}: the prompt or its images are not what the generator of ticket {group.ticket} had. All ranks "
                "must see the same files, and these must not change during a run."
            )
        return prompt.images

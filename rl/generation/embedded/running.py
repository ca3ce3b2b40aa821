"""A request in one of the embedded engine's slots."""

from dataclasses import dataclass, field

import numpy as np

from rl.generation.engine import Output, Request
from rl.model.head.support import nothing


@dataclass
class Running:
    """A request in a slot and what it has sampled so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # of all tokens but the newest, where recorded: [m, L, K] each
    support: list[np.ndarray] = field(default_factory=list)  # where recorded: [m, K] each

    @staticmethod
    def of(request: Request) -> "Running":
        if not (before := request.so_far):
            return Running(request)
        lists = map(list, (before.token_ids, before.log_probs, before.versions))
        support = before.support
        if support is None and (columns := request.sampling.support_columns):
            support = nothing(len(before.token_ids), columns)
        records = ([] if record is None else [record] for record in (before.routes, support))
        return Running(request, *lists, *records)

    @property
    def in_kv(self) -> tuple[int, ...]:
        """The tokens whose keys and values the next decoding step needs: all but the newest sampled one."""
        return (*self.request.prompt_ids, *self.token_ids[:-1])

    @property
    def key(self) -> tuple:
        """What the same keys and values come of: prompts of the same tokens may have other images."""
        return (self.request.images.digest if self.request.images else None, *self.in_kv)

    @property
    def ahead(self) -> int:
        """The distance of a token's rotary position from its place in the sequence: an image takes fewer than it has tokens."""
        images = self.request.images
        return images.next_position - len(self.request.prompt_ids) if images else 0

    def output(self, reason: str) -> Output:
        lists = (list(self.token_ids), list(self.log_probs), list(self.versions))
        records = (np.concatenate(record) if record else None for record in (self.routes, self.support))
        return Output(self.request.id, *lists, reason, *records)

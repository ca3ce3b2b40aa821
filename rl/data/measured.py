"""The rows that can be used: each rank measures a part of them, and all ranks get the whole."""

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed

from rl.errors import UserError
from rl.ranks import dist


@dataclass
class Measured:
    kept: array = field(default_factory=lambda: array("q"))  # numbers of the rows that can be used
    truncated: int = 0  # how many of these have prompts that will be cut
    error: str | None = None  # about a row that cannot be used; the rows of this part after it are not measured

    def to_bytes(self) -> bytes:
        return json.dumps([self.truncated, self.error]).encode() + b"\n" + self.kept.tobytes()

    @staticmethod
    def of_bytes(data: bytes) -> "Measured":
        head, _, rows = data.partition(b"\n")
        return Measured(array("q", rows), *json.loads(head))


def measure(rows: int, measure_part: Callable[[range, Measured], None]) -> Measured:
    """Return the findings of all ranks of the default group together. measure_part: adds those of this rank's part of the
    rows, or raises UserError for a row that cannot be used, which is an error here rather than in the middle of a run.
    Collective."""
    joined = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)
    own = Measured()
    whole = Measured()
    try:
        measure_part(range(rows * rank // ranks, rows * (rank + 1) // ranks), own)
    except UserError as error:
        own.error = str(error)
    parts = dist.all_gather_bytes(own.to_bytes()) if ranks > 1 else [own.to_bytes()]
    for part in map(Measured.of_bytes, parts):
        if part.error:
            raise UserError(part.error)
        whole.kept.extend(part.kept)
        whole.truncated += part.truncated
    return whole

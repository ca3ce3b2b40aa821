"""The rows that can be used: each rank measures a part of them, and all ranks get the whole."""

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed
from rich.progress import track

from rl.errors import UserError
from rl.ranks import dist, launch, watchdog


@dataclass
class Measured:
    kept: array = field(default_factory=lambda: array("q"))  # numbers of the rows that can be used
    truncated: int = 0  # how many of these have prompts that will be cut
    sources: dict[str, list[int]] = field(default_factory=dict)  # data_source -> [its first row, the number of its rows]


def measure(rows: int, what: str, measure_row: Callable[[int, Measured], None]) -> Measured:
    """Return the findings of all ranks of the default group together. measure_row: adds those of a row, or raises UserError for
    one that cannot be used, which is an error here rather than in the middle of a run. Collective."""
    joined = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)
    own = Measured()
    error = None
    part = range(rows * rank // ranks, rows * (rank + 1) // ranks)
    shown = track(part, f"measuring {what}", transient=True, disable=launch.here().rank != 0)
    try:
        with contextlib.closing(shown):  # an error leaves no bar, whose thread could block a later one
            for row in shown:
                measure_row(row, own)
                watchdog.progress()
    except UserError as found:
        error = str(found)
    mine = [[*own.kept], own.truncated, own.sources, error]
    whole = Measured()
    for kept, truncated, sources, error in dist.all_gather_values(mine) if joined else [mine]:
        if error:
            raise UserError(error)
        whole.kept.extend(kept)
        whole.truncated += truncated
        for source, (first, count) in sources.items():
            whole.sources.setdefault(source, [first, 0])[1] += count
    return whole

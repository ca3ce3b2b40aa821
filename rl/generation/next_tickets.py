"""The tickets of the next batch: one after the other. With --prompt-sampling rl/samples/prompt_history.py passes over some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.data.job import Job
from rl.generation.engine import EngineArgs
from rl.samples.group import Group

if TYPE_CHECKING:
    from rl.samples.prompt_history import PromptHistory


class NoHistory:
    """Prompts are taken whatever their groups have shown."""

    def take(self, first: int, count: int) -> tuple[Sequence[int], int]:
        """`count` tickets from `first` on, and the one behind the last."""
        return range(first, first + count), first + count

    def note(self, groups: Sequence[Group]) -> None:
        """Keeps nothing of a batch."""


def make_history(args: EngineArgs, job: Job) -> NoHistory | PromptHistory:
    """What the flags ask for."""
    if args.prompt_sampling == "uniform":
        return NoHistory()
    from rl.samples.prompt_history import PromptHistory  # for it alone

    return PromptHistory(args, job.order)

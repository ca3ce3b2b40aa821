"""Ranks that share one tensor parallel engine (--rollout-tp) do all the same.

vLLM's ranks meet in every layer, so each must add the same requests and step as often as the others. Where a batch is made
whole that needs no message between them: every rank knows all tickets beforehand, and the engine is stepped until it is empty.
"""

import dataclasses

from rl.dist import Ranks
from rl.generator import Generator


class Echo(Generator):
    """The generator on the other ranks of an engine: does what the first one does, but is not heard in the validation."""

    def validate(self, prompts, indices):
        super().validate(prompts, indices)
        return []


def share_engines(ranks: Ranks, rollout_tp: int) -> tuple[Ranks, type[Generator]]:
    """(This rank's place counted in engines of `rollout_tp` ranks each, which generator it runs.)"""
    place = dataclasses.replace(ranks, rank=ranks.rank // rollout_tp, world_size=ranks.world_size // rollout_tp)
    return place, Echo if ranks.rank % rollout_tp else Generator

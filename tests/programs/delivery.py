"""Started by test_delivery.py: learners, as if on several nodes, make batches from the groups that either node received.

torchrun ... delivery.py SEQUENCE_PARALLEL [NODE ...]      of each rank, the node that it is to be on; all is checked then

Prints a line a node, by its first rank: the bytes that came into it; those of the responses that it trains and did not have,
and of all that it trains.
"""

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from helpers import make_group

from rl.learning import delivery
from rl.learning.batch import Batch, micro_batches
from rl.learning.division import Division
from rl.ranks import process
from rl.samples import outlines
from rl.transport.exchange import Exchange

PROMPTS, MAX_TOKENS, GROUPS, STEPS = 4, 4096, 16, 3


def make_groups(seed: int):
    """Groups of many sizes: some with routes, masks with holes, images, or responses without tokens or score."""
    rng = np.random.default_rng(seed)
    groups = []
    for ticket in range(GROUPS):
        group = make_group(
            ticket, rng.integers(0, 900, 8), prompt=int(rng.integers(1, 90)), rng=rng, masked=True, unscored=(3,)
        )
        in_runs = lambda r: None if r.mask is None else np.repeat(r.mask[::20], 20)[: len(r.mask)]  # noqa: E731
        group = dataclasses.replace(group, responses=[dataclasses.replace(r, mask=in_runs(r)) for r in group.responses])
        if ticket % 3 == 0:
            draw = lambda n: rng.integers(0, 99, (max(0, n), 2, 3), dtype=np.uint8)  # noqa: E731
            with_routes = [dataclasses.replace(r, routes=draw(len(r.token_ids) - 1)) for r in group.responses]
            group = dataclasses.replace(group, responses=with_routes, prompt_routes=draw(len(group.prompt_ids)))
        groups.append(dataclasses.replace(group, images="digest" if ticket % 5 == 0 else ""))
    return groups


def check_batch(whole: Batch, batch: Batch, ranks) -> None:
    """Check that the batch equals the batch of a learner with all groups."""
    of_each_node = {"prompts", "routes", "prompt_routes", "division"}
    for name in {field.name for field in dataclasses.fields(Batch)} - of_each_node:
        a, b = getattr(whole, name), getattr(batch, name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
    assert batch.total_lengths() == whole.total_lengths() and batch.distinct_tokens() == whole.distinct_tokens()
    for mini_a, mini_b in zip(whole.mini_batches(PROMPTS), batch.mini_batches(PROMPTS), strict=True):
        rows = zip(*(micro_batches(b, m, MAX_TOKENS, ranks) for b, m in ((whole, mini_a), (batch, mini_b))), strict=True)
        for a, b in rows:
            assert torch.equal(a.inputs["input_ids"], b.inputs["input_ids"]) and torch.equal(a.labels, b.labels)
            assert (a.routes is None) == (b.routes is None) and (a.routes is None or torch.equal(a.routes, b.routes))


def trained_here(groups, division: Division, here: list[int]) -> list[list[int]]:
    """Return the responses of each group that these ranks train, by the rule of rl/learning/batch.py."""
    out = [[] for _ in groups]
    for owner in {rank // division.ranks.sequence_parallel for rank in here}:
        of_rank = dataclasses.replace(division.ranks, rank=owner * division.ranks.sequence_parallel)
        batch = Batch.of(groups, dataclasses.replace(division, ranks=of_rank))
        scored = [(i, j) for i, g in enumerate(groups) for j, r in enumerate(g.responses) if r.score is not None]
        for (i, j), n in zip(scored, batch.local_lengths.tolist(), strict=True):
            out[i] += [j] if n else []
    return out


def size(groups, those: list[list[int]]) -> int:
    """Return the bytes of these responses of each group, with their prompts."""
    parts = [dataclasses.replace(g, responses=[g.responses[j] for j in js]) for g, js in zip(groups, those, strict=True)]
    return sum(len(part.to_bytes()) for part in parts if part.responses)


def check_known(groups, known) -> None:
    """Check the data on groups whose tokens are elsewhere."""
    for whole, outline in zip(groups, known, strict=True):
        assert outline.oldest == whole.oldest and outline.has_signal == whole.has_signal
        assert [len(r.token_ids) for r in outline.responses] == [len(r.token_ids) for r in whole.responses]
        assert not whole.images or np.array_equal(outline.prompt_ids, whole.prompt_ids)


def main(ranks) -> None:
    sequence_parallel, *node_of = sys.argv[1:]
    if node_of:
        os.environ["GROUP_RANK"] = node_of[ranks.rank]
    ranks, exchange = dataclasses.replace(ranks, sequence_parallel=int(sequence_parallel)), Exchange.of_all_ranks()
    division, came, elsewhere, trained = Division(PROMPTS, MAX_TOKENS, ranks), 0, 0, 0
    for step in range(STEPS):
        groups = make_groups(step)
        before = exchange.received
        known = outlines.all_gather_groups([g for g in groups if (g.ticket // 2 + step) % ranks.world_size == ranks.rank])
        there = delivery.to_trainers(known, division)
        came += exchange.received - before
        own = trained_here(groups, division, exchange.here)
        trained += size(groups, own)
        elsewhere += size(groups, [js if g.holder != exchange.here[0] else [] for g, js in zip(known, own, strict=True)])
        if node_of:
            check_known(groups, known)
            check_batch(Batch.of(groups, division), Batch.of(there, division), ranks)
            first, whole = delivery.to_first(known[:2]), delivery.to_trainers(known, division, all_to_first=True)
            mixed = delivery.to_trainers([groups[0], *known[1:]], division)  # after a resume: every rank has the first
            check_batch(Batch.of(groups, division), Batch.of(mixed, division), ranks)
            if exchange.here[0] == 0:
                assert [g.to_bytes() for g in [*first, *whole]] == [g.to_bytes() for g in [*groups[:2], *groups]]
    if ranks.rank == exchange.here[0]:
        print(f"rank {ranks.rank}: {came} came, {elsewhere} of {trained} trained", flush=True)


process.run(main)

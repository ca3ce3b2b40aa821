"""Responses to the nodes that train them, when every node knows the outlines of all (rl/samples/outlines.py)."""

from collections.abc import Sequence
from dataclasses import replace

from rl.learning.batch import of_flat_groups
from rl.learning.division import Division
from rl.samples.group import Group
from rl.transport.exchange import Exchange
from rl.transport.records import join_records, split_records


def to_trainers(groups: list[Group], division: Division, all_to_first: bool = False) -> list[Group]:
    """The groups of a batch, with the tokens of all responses that the ranks of this node train. all_to_first: the first node
    gets all of them. A collective."""
    if all(group.holder is None for group in groups):
        return groups
    groups = sorted(groups, key=lambda group: group.ticket)
    scored = [(i, j) for i, g in enumerate(groups) for j, r in enumerate(g.responses) if r.score is not None]
    prompts = [len(groups[i].prompt_ids) for i, _ in scored]
    lengths = [len(groups[i].prompt_ids) + len(groups[i].responses[j].token_ids) for i, j in scored]
    flat = of_flat_groups(groups) if division.packs_flat_apart else None
    exchange, owners = Exchange.of_all_ranks(), division.owners(lengths, prompts, [i for i, _ in scored], flat)
    nodes_of = {owner: {exchange.first_of[rank] for rank in division.ranks_of(owner)} for owner in {*owners}}
    wanted = {node: [[] for _ in groups] for node in exchange.nodes}
    for (i, j), owner in zip(scored, owners, strict=True):
        for node in nodes_of[owner]:
            wanted[node][i].append(j)
    if all_to_first:
        wanted |= _all_to_first(groups)
    return _send(groups, wanted)


def to_first(groups: list[Group]) -> list[Group]:
    """The groups, whole on the ranks of the first node. A collective."""
    if all(group.holder is None for group in groups):
        return groups
    nothing = {node: [[] for _ in groups] for node in Exchange.of_all_ranks().nodes}
    return _send(groups, nothing | _all_to_first(groups))


def _all_to_first(groups: list[Group]) -> dict[int, list[list[int]]]:
    return {0: [list(range(len(group.responses))) for group in groups]}


def _send(groups: list[Group], wanted: dict[int, list[list[int]]]) -> list[Group]:
    """wanted: by node, its first rank, of each group the responses that are to be there."""
    exchange = Exchange.of_all_ranks()
    own = exchange.here[0]
    parcels = []
    for node in exchange.nodes:
        leaves = zip(groups, wanted[node], strict=True) if exchange.rank == own != node else ()
        parcels.append(
            join_records([_part(group, those).to_bytes() for group, those in leaves if those and group.holder == own])
        )
    parts = {part.ticket: part for part in map(Group.from_bytes, split_records(exchange.deliver(parcels)))}
    return [
        _with_part(group, those, parts[group.ticket]) if those and group.holder not in (None, own) else group
        for group, those in zip(groups, wanted[own], strict=True)
    ]


def _part(group: Group, those: Sequence[int]) -> Group:
    return replace(group, responses=[group.responses[j] for j in those])


def _with_part(group: Group, those: Sequence[int], part: Group) -> Group:
    """The group with those responses of it, and the prompt, as they came."""
    responses = list(group.responses)
    for j, response in zip(those, part.responses, strict=True):
        responses[j] = response
    return replace(part, responses=responses, holder=group.holder)

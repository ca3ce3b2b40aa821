"""A batch's tokens go only to the nodes that train them.

What comes in on a node with learners stays there, for all learners of the node to map. The other nodes get an outline of it:
the scores, lengths and ages from which every learner makes the same batch and the same division of it. Then each node sends
each other one the responses that are trained there, with their prompts: a node receives what it trains and does not have.

    outlined -> gather -> Group, whole or an outline -> to_trainers -> Group with the responses that are trained here

Numbers of an outline's tokens cannot be taken for real ones: ids are -1, log-probs NaN. On one node all are whole, and nothing
here does anything.
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rl.batch import Group, Response, join_records, of_flat_groups, split_records
from rl.exchange import Exchange
from rl.shares import Division

OUTLINE = struct.pack("<I", 0)  # instead of the size of a record's header


def outlined(record: bytes) -> bytes:
    """A group's record (Group.to_bytes) without its tokens. A prompt with images keeps its own: they tell the images' sizes."""
    group = Group.from_bytes(record)
    oldest = [int(r.versions.min()) if len(r.versions) else 0 for r in group.responses]
    has_routes = [r.routes is not None for r in group.responses]
    header = {
        "ticket": group.ticket,
        "data_source": group.data_source,
        "baseline": group.baseline,
        "images": group.images,
        "prompt": group.prompt_ids.tolist() if group.images else len(group.prompt_ids),
        "responses": [
            [len(r.token_ids), r.finish_reason, r.score, r.extra, r.error, old]
            for r, old in zip(group.responses, oldest, strict=True)
        ],
    }
    if group.prompt_routes is not None:
        header["routes"] = [str(group.prompt_routes.dtype), *group.prompt_routes.shape[1:], has_routes]
    return OUTLINE + json.dumps(header).encode()


def read(record: bytes | memoryview, holder: int | None) -> Group:
    """The group of a record, or of its outline. holder: as Group's."""
    if bytes(record[:4]) != OUTLINE:
        group = Group.from_bytes(record)
        return group if holder is None else replace(group, holder=holder)
    header = json.loads(bytes(record[4:]))
    prompt = header["prompt"]
    prompt = np.array(prompt, np.int32) if isinstance(prompt, list) else _absent(prompt, np.int32, -1)
    responses = []
    for n, *fields, oldest in header["responses"]:
        of_tokens = _absent(n, np.int32, -1), _absent(n, np.float32, np.nan), _absent(n, np.int32, oldest)
        responses.append(Response(*of_tokens, *fields))
    prompt_routes = None
    if "routes" in header:
        dtype, *shape, has = header["routes"]
        prompt_routes = _absent((len(prompt), *shape), dtype, 0)
        responses = [
            replace(r, routes=_absent((max(0, len(r.token_ids) - 1), *shape), dtype, 0)) if is_there else r
            for r, is_there in zip(responses, has, strict=True)
        ]
    known = (header["ticket"], prompt, header["data_source"], responses, header["baseline"], header["images"])
    return Group(*known, prompt_routes, holder)


def _absent(shape: int | tuple[int, ...], dtype, value: float) -> np.ndarray:
    """An array of that value which takes no memory."""
    return np.broadcast_to(np.array(value, dtype), shape)


def gather(records: list[bytes], outline: Callable[[bytes], bytes] = outlined) -> list[tuple[memoryview, int | None]]:
    """All ranks' records in rank order, each with its group's holder; of other nodes' what `outline` makes of them. A
    collective."""
    own = Exchange.of_all_ranks()
    shares = own.share(join_records(records), lambda: join_records(map(outline, records)))
    return [(record, own.holder(rank)) for rank, share in enumerate(shares) for record in split_records(share)]


def share(mine: list[Group]) -> list[Group]:
    """Every rank's groups on every rank, in ticket order: whole on the ranks of its node, outlines on the others."""
    groups = [read(record, holder) for record, holder in gather([group.to_bytes() for group in mine])]
    return sorted(groups, key=lambda group: group.ticket)


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
    came, out = iter(split_records(exchange.deliver(parcels))), list(groups)
    for node in exchange.nodes:
        for i, (group, those) in enumerate(zip(groups, wanted[own], strict=True)):
            if those and group.holder == node != own:
                out[i] = _with_part(group, those, Group.from_bytes(next(came)))
    return out


def _part(group: Group, those: Sequence[int]) -> Group:
    return replace(group, responses=[group.responses[j] for j in those])


def _with_part(group: Group, those: Sequence[int], part: Group) -> Group:
    """The group with those responses of it, and the prompt, as they came."""
    if part.ticket != group.ticket or len(part.responses) != len(those):
        raise RuntimeError(f"of ticket {group.ticket} came another part than was asked for")
    responses = list(group.responses)
    for j, response in zip(those, part.responses, strict=True):
        responses[j] = response
    return replace(part, responses=responses, holder=group.holder)

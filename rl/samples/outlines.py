"""A batch's tokens go only to the nodes that train them.

Samples that arrive on a node with learners stay there, for all learners of the node to map. The other nodes get an outline of
it: the scores, lengths and ages from which every learner makes the same batch and the same division of it. Then each node sends
each other one the responses that are trained there, with their prompts: a node receives what it trains and does not have.

    outlined -> gather -> Group, whole or an outline -> to_trainers -> Group with the responses that are trained here

Numbers of an outline's tokens cannot be taken for real ones: ids are -1, log-probs NaN. On one node all are whole, and nothing
here does anything. `to_trainers` is in rl/learning/delivery.py.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rl.samples.group import Group, Response, join_records, split_records
from rl.transport.exchange import Exchange

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

"""A batch's tokens go only to the nodes that train them.

Samples that arrive on a node with learners stay there, for all learners of the node to map. The other nodes get an outline of
each group, the beginning of its record: prompt, scores, lengths and ages, from which every learner makes the same batch and the
same division of it. Then each node sends each other one the responses that are trained there (rl/learning/delivery.py).

    outlined -> gather -> Group, whole or an outline -> to_trainers -> Group with the responses that are trained here

On one node all are whole, and nothing here does anything.
"""

from collections.abc import Callable

from rl.samples.group import Group, head_bytes
from rl.transport.exchange import Exchange
from rl.transport.records import join_records, split_records


def outlined(record: bytes) -> bytes:
    """A group's record (Group.to_bytes) without the tokens of its responses."""
    return record[: head_bytes(record)]


def gather(records: list[bytes], outline: Callable[[bytes], bytes] = outlined) -> list[tuple[memoryview, int | None]]:
    """All ranks' records in rank order, each with its group's holder; of other nodes' what `outline` makes of them. A
    collective."""
    own = Exchange.of_all_ranks()
    shares = own.share(join_records(records), lambda: join_records(map(outline, records)))
    return [(record, own.holder(rank)) for rank, share in enumerate(shares) for record in split_records(share)]


def all_gather_groups(mine: list[Group]) -> list[Group]:
    """Every rank's groups on every rank, in ticket order: whole on the ranks of its node, outlines on the others."""
    groups = [Group.from_bytes(record, holder) for record, holder in gather([group.to_bytes() for group in mine])]
    return sorted(groups, key=lambda group: group.ticket)

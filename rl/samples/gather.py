"""All-gathers of records and of groups."""

from collections.abc import Iterable

from rl.ranks.dist import all_gather_bytes
from rl.samples.group import Group
from rl.transport.records import join_records, split_records


def all_gather_records(mine: Iterable[bytes]) -> list[memoryview]:
    """Return the records of all ranks of the default group, in rank order. Collective."""
    parts = all_gather_bytes(join_records(mine))
    return [record for part in parts for record in split_records(memoryview(part))]


def all_gather_groups(mine: list[Group]) -> list[Group]:
    """Return every rank's groups, in ticket order. Collective."""
    groups = [Group.from_bytes(record) for record in all_gather_records(group.to_bytes() for group in mine)]
    return sorted(groups, key=lambda group: group.ticket)

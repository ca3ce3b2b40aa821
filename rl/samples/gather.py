"""What some ranks have of a batch, on all of them."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from rl.ranks import watchdog
from rl.samples.group import Group
from rl.transport.records import join_records, split_records


@watchdog.doing("the samples of all ranks")
def all_gather_records(mine: Iterable[bytes]) -> list[memoryview]:
    """The records of all ranks of the default group, in rank order. Each rank that has any broadcasts them. A collective."""
    joined = bytearray(join_records(mine))
    if dist.get_world_size() == 1:
        return split_records(memoryview(joined))
    own = torch.frombuffer(joined or bytearray(1), dtype=torch.uint8)
    size = torch.tensor([len(own)])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    parts = [own if rank == dist.get_rank() else torch.empty(int(size), dtype=torch.uint8) for rank, size in enumerate(sizes)]
    sent = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts) if len(part) > 1]
    for one in sent:
        one.wait()
    return [record for part in parts if len(part) > 1 for record in split_records(memoryview(part.numpy()))]


def all_gather_groups(mine: list[Group]) -> list[Group]:
    """Every rank's groups, in ticket order. A collective."""
    groups = [Group.from_bytes(record) for record in all_gather_records(group.to_bytes() for group in mine)]
    return sorted(groups, key=lambda group: group.ticket)

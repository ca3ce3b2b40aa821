"""Whole parameters made of the shards of all ranks; and rows that ranks trade with each other (`AllToAll`).

Parameters are gathered in buckets, one collective each, and cast before they travel. DTensor's own `full_tensor` is a
collective for each parameter, in the precision that is trained: over a slow network this costs a round trip for each, and twice
the bytes that generators in bf16 need.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from rl.ranks import watchdog
from rl.ranks.device import gathers_to_one
from rl.ranks.dist import all_gather_values
from rl.ranks.shards import Block, as_it_is, in_parts

BUCKET_BYTES = 64 << 20  # of whole parameters; a larger parameter goes alone
UNDER_WAY = 3  # buckets: over a slow network a bucket does not wait for the one before to arrive


class Shards:
    """The parameters, DTensors over any mesh of all ranks, and the places of each rank's shards in them. Made collectively."""

    def __init__(self, parameters: dict[str, Tensor]):
        self.parameters = parameters
        of_ranks = all_gather_values({name: astuple(Block.of(tensor)) for name, tensor in parameters.items()})
        # name -> each rank's shard
        self._places = {name: [Block(*map(tuple, blocks[name])) for blocks in of_ranks] for name in parameters}

    def whole(
        self,
        held: dict[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        to: Sequence[int] | None = None,
        change: Callable[[str, Tensor], Tensor] = as_it_is,
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor on the device) of every tensor in order: on the ranks `to`, by default all. held: some of the
        parameters, or other tensors that are sharded alike. change: (name, this rank's shard) -> the tensor to send instead. A
        collective, through which all ranks iterate in step."""
        receives = to is None or dist.get_rank() in to
        under_way = deque()
        for names in map(list, in_parts(held.items(), BUCKET_BYTES, dtype)):
            sizes = [sum(math.prod(self._places[name][rank].shape) for name in names) for rank in range(dist.get_world_size())]
            mine = torch.zeros(max(sizes), dtype=dtype, device=device)
            shards = (change(name, held[name].to_local()).flatten() for name in names)
            torch.cat([shard.to(device, dtype) for shard in shards], out=mine[: sizes[dist.get_rank()]])
            to_all = to is None or not gathers_to_one(device)
            received = [torch.empty_like(mine) for _ in sizes] if receives or to_all else None
            if to_all:
                works = [dist.all_gather(received, mine, async_op=True)]
            else:
                works = [dist.gather(mine, received if dist.get_rank() == one else None, one, async_op=True) for one in to]
            under_way.append((works, names, received if receives else None, mine))
            if len(under_way) == UNDER_WAY:
                yield from self._arrived(*under_way.popleft()[:3])
        for works, names, received, _ in under_way:
            yield from self._arrived(works, names, received)

    def _arrived(self, works: list[dist.Work], names: list[str], received: list | None) -> Iterator[tuple[str, Tensor]]:
        """Wait for a bucket, and yield its parameters. received: each rank's shards of them, end to end; None elsewhere."""
        for work in works:
            work.wait()
        watchdog.progress()
        if not received:
            return
        sizes = [[math.prod(block.shape) for block in self._places[name]] for name in names]  # of each parameter, by rank
        begins = [[0, *accumulate(of_rank)] for of_rank in zip(*sizes, strict=True)]
        for number, name in enumerate(names):
            whole = received[0].new_empty(self.parameters[name].shape)
            for rank, block in enumerate(self._places[name]):
                part = received[rank][begins[rank][number] : begins[rank][number + 1]].view(block.shape)
                whole[block.slices()] = part
            yield name, whole


class AllToAll(torch.autograd.Function):
    """(x [R, ...], rows to send to each rank of the group, to receive from each, group) -> [R', ...] in rank order."""

    @staticmethod
    def forward(ctx, x, sent: list[int], received: list[int], group: dist.ProcessGroup):
        ctx.rows = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received, group = ctx.rows
        return AllToAll.apply(grad, received, sent, group), None, None, None

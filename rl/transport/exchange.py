"""Records from all ranks to all ranks: into each node once, and inside it through shared memory.

What one rank has, its neighbours on the node map: nothing is copied. Between nodes the first rank of each sends what its node
has for the others to the first of these, which lays it open to its neighbours. So a node receives what the others have for it
once, whatever its number of ranks, and nothing else.

The memory is a memfd, as the ring's: it has no name in the file system, and the kernel frees it when the last array over it is
gone, or the last process.
"""

import functools
import os
import platform
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from rl.ranks import watchdog
from rl.ranks.device import HOST_BACKEND
from rl.ranks.dist import all_gather_bytes, show_group
from rl.transport.records import join_records, split_records


class Exchange:
    """Of all ranks of the default process group; each call is a collective."""

    @staticmethod
    @functools.cache
    def of_all_ranks() -> "Exchange":
        """The process's own."""
        return Exchange()

    def __init__(self):
        self.rank, size = dist.get_rank(), dist.get_world_size()
        here = f"{platform.node()}/{os.environ.get('GROUP_RANK')}".encode()  # the tests' nodes share a machine
        node_of = all_gather_bytes(here)
        nodes = [[rank for rank in range(size) if node_of[rank] == name] for name in dict.fromkeys(node_of)]
        self.here = next(node for node in nodes if self.rank in node)
        self.first_of = {rank: node[0] for node in nodes for rank in node}
        groups = {tuple(node): dist.new_group(node, backend=HOST_BACKEND) for node in nodes if len(node) > 1}
        self._neighbours = groups.get(tuple(self.here))
        self.nodes = firsts = [node[0] for node in nodes]  # the first rank of each
        self._firsts = dist.new_group(firsts, backend=HOST_BACKEND) if len(nodes) > 1 else None
        if self._neighbours:
            show_group("the ranks of this node", self._neighbours)
        if self.rank not in firsts:
            self._firsts = None
        elif self._firsts:
            show_group("the first ranks of the nodes", self._firsts)
        self._others = [rank for node in nodes if node != self.here for rank in node]
        self._offered: list[int] = []  # files that neighbours may have yet to open
        self.received = 0  # bytes from other nodes, since the start

    def holder(self, rank: int) -> int | None:
        """The first rank of that rank's node; None if there is one node."""
        return self.first_of[rank] if len(self.nodes) > 1 else None

    @watchdog.doing("the samples of all ranks")
    def share(self, own: bytes, abroad: Callable[[], bytes] | None = None) -> list[memoryview]:
        """Every rank's bytes, in rank order; they stay where they are as long as somebody holds them. abroad: makes what the
        other nodes get in place of own. A collective."""
        if len(self.first_of) == 1:
            return [memoryview(own)]
        size = torch.tensor([len(own)])
        sizes = [torch.empty_like(size) for _ in self.first_of]
        dist.all_gather(sizes, size)
        if not any(sizes):
            return [memoryview(b"")] * len(sizes)
        if len(self.nodes) == 1:
            return self._lay_open(own)
        records = [own, abroad() if own else b""] if abroad else [own]
        laid_open = [split_records(of_rank) for of_rank in self._lay_open(join_records(records))]
        parcel = join_records(records[-1] for records in laid_open) if self._firsts else b""
        came = self._between_nodes([b"" if node == self.here[0] else parcel for node in self.nodes])
        shares = {rank: records[0] for rank, records in zip(self.here, laid_open, strict=True)}
        shares |= dict(zip(self._others, split_records(came), strict=True))
        return [shares[rank] for rank in range(len(sizes))]

    @watchdog.doing("the samples that are trained on this node")
    def deliver(self, parcels: Sequence[bytes]) -> memoryview:
        """Each node's parcel for each other one, in the order of `nodes`, from its first rank (of other ranks they are not
        looked at) -> what came for this node, on all of its ranks, in the same order end to end. A collective."""
        return self._between_nodes(parcels)

    def _between_nodes(self, parcels: Sequence[bytes]) -> memoryview:
        came = memoryview(b"")
        if self._firsts:
            sizes = torch.tensor([len(parcel) for parcel in parcels])
            coming = torch.empty_like(sizes)
            dist.all_to_all_single(coming, sizes, group=self._firsts)
            came = self._memory(int(coming.sum()))
            given = torch.frombuffer(bytearray().join([*parcels, b"."]), dtype=torch.uint8)[:-1]  # none may be empty
            taken = torch.frombuffer(came, dtype=torch.uint8) if came else torch.empty(0, dtype=torch.uint8)
            dist.all_to_all_single(taken, given, coming.tolist(), sizes.tolist(), group=self._firsts)
            self.received += len(came)
        return self._lay_open(came)[0]

    def _lay_open(self, own: bytes | memoryview) -> list[memoryview]:
        """What each rank of this node has."""
        if self._neighbours:
            laid_open = self._mapped(own)
        else:
            laid_open = [own if isinstance(own, memoryview) else memoryview(bytearray(own))]
        while self._offered:
            os.close(self._offered.pop())
        return laid_open

    def _mapped(self, own: bytes | memoryview) -> list[memoryview]:
        if own and isinstance(own, bytes):
            memory = self._memory(len(own))
            memory[:] = own
        offer = torch.tensor([os.getpid(), self._offered[-1] if len(own) else -1, len(own)])
        offers = [torch.empty_like(offer) for _ in self.here]
        dist.all_gather(offers, offer, self._neighbours)
        maps = [_map(*offer.tolist(), shared=False) for offer in offers]
        dist.barrier(self._neighbours)  # from here on nobody needs this process's file, or this process
        return maps

    def _memory(self, size: int) -> memoryview:
        """Memory that neighbours can open, while this rank has its file."""
        if not size:
            return memoryview(b"")
        fd = os.memfd_create("rl-samples", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self._offered.append(fd)
        return _map(os.getpid(), fd, size, shared=True)


def _map(pid: int, fd: int, size: int, shared: bool) -> memoryview:
    """A process's memory. Unless shared, whoever writes into it changes nobody else's. (Python's own mmap would keep a file
    open for each.)"""
    if not size:
        return memoryview(b"")
    return memoryview(torch.from_file(f"/proc/{pid}/fd/{fd}", shared=shared, size=size, dtype=torch.uint8).numpy())

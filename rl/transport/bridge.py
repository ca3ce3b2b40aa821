"""Broadcasts from learners to generators, sent over the network to each node once, and inside a node through shared memory.

    a node's first learner --- gloo ---> first generator of each other node that it sends to
      | shared memory                      | shared memory
      its node's generators                its neighbours

A message is broadcast to the first ranks of the nodes. Each of them puts it into a ring (rl/transport/ring.py) for each of its
neighbours while the next messages are under way. If every rank has its own CUDA device, NCCL's broadcast replaces all this; it
also enters each node once.
"""

import itertools
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from rl.errors import RankLost
from rl.ranks import launch
from rl.ranks.device import is_accelerator
from rl.ranks.device_groups import device_group, host_group
from rl.transport.ring import Ring, RingTimeout

WINDOW = 32  # messages of 32 MB under way over a network: they fill a link of 160 Gbit/s with a latency of 50 ms
RING_BYTES = 16 << 20
PIECE_BYTES = 1 << 20  # in a record; a longer message takes several
LOOK_SECONDS = 0.2  # until a wait checks whether its neighbours are alive


def senders(nodes: Sequence[launch.Node]) -> dict[int, int]:
    """Return, for each node with generators, the node whose first learner sends weights to it and reads its samples. That is
    the node itself if it has learners; the other nodes are assigned to the nodes with learners in turn."""
    turn = itertools.cycle(number for number, node in enumerate(nodes) if node.learners)
    return {number: number if node.learners else next(turn) for number, node in enumerate(nodes) if node.generators}


class Bridge:
    """One rank's end. All ranks call `broadcast` in the same order, and wait for the returned handles in that order."""

    def __init__(self, group, device: torch.device, rings: "Rings | None" = None):
        """group: this rank's process group; None if it neither sends nor receives over the network. device: the tensors'."""
        self.group, self.device, self.rings = group, device, rings
        # The number of messages that may be under way: each takes memory of its receiver
        far = group and not is_accelerator(device)
        self.window = WINDOW if far else 1 if rings and not rings.is_first else 3

    @staticmethod
    def of(senders: dict[int, int], nodes: Sequence[launch.Node], number: int, local_rank: int, store, own, timeout):
        """Return this rank's bridge; None if it needs none. number: its node's. own: its device. Collective."""
        learns = local_rank < nodes[number].learners
        sender = number if learns else senders.get(number)
        if sender not in senders.values() or (learns and local_rank):
            return None
        receivers = [other for other in senders if senders[other] == sender for _ in range(nodes[other].generators)]
        place = 0 if learns else 1 + receivers.index(number) + local_rank - nodes[number].learners
        return Bridge.join(dist.PrefixStore(f"bridge/{sender}", store), place, [sender, *receivers], own, timeout)

    @staticmethod
    def join(store: dist.Store, place: int, node_of: Sequence[int], own: torch.device, timeout: timedelta) -> "Bridge":
        """Return the bridge between a learner and its generators. place: this rank's, 0 for the learner, 1 and up for
        generators. node_of: the node of each place. own: this rank's device. Collective."""
        if group := device_group(store, place, len(node_of), own, timeout):
            return Bridge(group, own)
        firsts = [node_of.index(node) for node in dict.fromkeys(node_of)]
        here = [other for other, node in enumerate(node_of) if node == node_of[place]]
        rings = None
        if place in firsts and len(firsts) > 1:
            group = host_group(store, firsts.index(place), len(firsts), timeout, WINDOW)
        if len(here) > 1:
            rings = Rings(dist.PrefixStore(f"node/{node_of[place]}", store), here.index(place), len(here))
        return Bridge(group, torch.device("cpu"), rings)

    def broadcast(self, tensor: torch.Tensor):
        """Start a broadcast of the contiguous tensor from the learner. Return a handle: after its `wait`, a generator's tensor
        is filled and the learner's may change. A learner with neighbours waits here for room."""
        over_network = self.group.broadcast([tensor], dist.BroadcastOptions()) if self.group else None
        if not self.rings:
            return over_network
        if not self.rings.is_first:
            return Handle(partial(self.rings.take, tensor))
        if self.group and self.group.rank():  # it passes on what arrives
            return Handle(over_network.wait, partial(self.rings.put, tensor))
        self.rings.put(tensor)
        return over_network or Handle()


class Handle:
    """The remaining steps of a message."""

    def __init__(self, *steps: Callable[[], object]):
        self._steps = [*steps]

    def wait(self) -> None:
        while self._steps:
            self._steps.pop(0)()


class Rings:
    """A ring from a node's first rank to each of its neighbours. A message takes a record for each piece."""

    def __init__(self, store: dist.Store, number: int, size: int):
        """number: this rank's among the `size` ranks of its node; 0 is the first. Collective."""
        self.is_first = number == 0
        if self.is_first:
            self._rings = [Ring.create(RING_BYTES) for _ in range(1, size)]
            store.set("first", json.dumps([os.getpid(), *(ring.address for ring in self._rings)]))
            self._others = [int(pid) for pid in store.multi_get([f"attached/{other}" for other in range(1, size)])]
        else:
            first, *addresses = json.loads(store.get("first"))
            self._rings = [Ring.attach(addresses[number - 1])]
            self._others = [first]  # process ids
            store.set(f"attached/{number}", str(os.getpid()))

    def put(self, data: torch.Tensor) -> None:
        """Send the data to all neighbours; wait while one of the rings is full."""
        for piece in _pieces(data):
            for ring in self._rings:
                self._persist(partial(ring.put, piece.numpy()))

    def take(self, data: torch.Tensor) -> None:
        """Fill data with the next message, which has its length."""
        for piece in _pieces(data):
            self._persist(partial(self._rings[0].get, into=piece.numpy().data))

    def _persist(self, act: Callable[..., object]) -> None:
        """Call act(timeout=...) until it succeeds. Raise RankLost if another process has exited."""
        lost = []
        while True:
            try:
                act(timeout=LOOK_SECONDS)
                return
            except RingTimeout:
                if lost:
                    raise RankLost(f"connection lost: process {lost[0]}, with which weights are shared, has exited") from None
                lost = [pid for pid in self._others if not launch.is_alive(pid)]


def _pieces(data: torch.Tensor) -> Sequence[torch.Tensor]:
    return data.view(-1).view(torch.uint8).split(PIECE_BYTES)

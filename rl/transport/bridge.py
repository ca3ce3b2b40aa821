"""Broadcasts from learners to generators, sent over the network to each node once, and inside a node through shared memory.

    a node's first learner --- gloo ---> first generator of each other node that it sends to
      | shared memory                      | shared memory
      its node's generators                its neighbours

A message is broadcast to the first ranks of the nodes. Each of them exposes it in a few slots of shared memory, from which its
neighbours take it while the next messages are under way. If every rank has its own CUDA device, NCCL's broadcast replaces all
this; it also enters each node once.

The shared memory is a memfd, like the ring's: it has no name, and the kernel frees it when the last process that maps it ends.
Its words count the pieces exposed, and the pieces that each neighbour has taken.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from rl.errors import RankLost
from rl.ranks import launch
from rl.ranks.device import device_group, host_group, is_accelerator
from rl.transport.ring import Barrier, wait

WINDOW = 32  # messages of 32 MB under way over a network: they fill a link of 160 Gbit/s with a latency of 50 ms
SLOTS = 4  # pieces that are exposed at a time
SLOT_BYTES = 8 << 20  # in a slot; a longer message takes several pieces
PAGE = 1 << 16  # bytes of the words, enough for 1,024 ranks on a node; the slots follow
LAID, LINE = 0, 8  # 64-bit words: pieces exposed; pieces taken by neighbour n, at n * LINE, in a cache line of its own
LOOK_SECONDS = 0.2  # until a wait checks whether its neighbours are alive


def senders(nodes: Sequence[launch.Node]) -> dict[int, int]:
    """Return, for each node with generators, the node whose first learner sends weights to it and reads its samples. That is
    the node itself if it has learners; the other nodes are assigned to the nodes with learners in turn."""
    turn = itertools.cycle(number for number, node in enumerate(nodes) if node.learners)
    return {number: number if node.learners else next(turn) for number, node in enumerate(nodes) if node.generators}


class Bridge:
    """One rank's end. All ranks call `broadcast` in the same order, and wait for the returned handles in that order."""

    def __init__(self, group, device: torch.device, slots: "Slots | None" = None, is_far: bool = False):
        """group: this rank's process group; None if it neither sends nor receives over the network. device: the tensors'.
        is_far: whether the tensors are in host memory and cross a network, on their way to this rank or another."""
        self.group, self.device, self.slots, self.is_far = group, device, slots, is_far
        # The number of messages that may be under way: each takes memory of its receiver
        far = group and not is_accelerator(device)
        self.window = WINDOW if far else 1 if slots and not slots.is_first else 3

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
        """Return the bridge between a sending learner and its generators. place: this rank's, 0 for the learner, 1 and up for
        generators. node_of: the node of each place. own: this rank's device. Collective."""
        group = device_group(store, place, len(node_of), own, timeout)
        return Bridge(group, own) if group else Bridge.over_host(store, place, node_of, timeout)

    @staticmethod
    def over_host(store: dist.Store, place: int, node_of: Sequence[int], timeout: timedelta) -> "Bridge":
        """Return a bridge that sends host memory. Collective."""
        firsts = [node_of.index(node) for node in dict.fromkeys(node_of)]
        here = [other for other, node in enumerate(node_of) if node == node_of[place]]
        group, slots = None, None
        if place in firsts and len(firsts) > 1:
            group = host_group(store, firsts.index(place), len(firsts), timeout, WINDOW)
        if len(here) > 1:
            slots = Slots(dist.PrefixStore(f"node/{node_of[place]}", store), here.index(place), len(here), timeout)
        return Bridge(group, torch.device("cpu"), slots, is_far=len(firsts) > 1)

    def broadcast(self, tensor: torch.Tensor):
        """Start a broadcast of the contiguous tensor from the learner. Return a handle: after its `wait`, a generator's tensor
        is filled and the learner's may change. A learner with neighbours waits here for free slots."""
        over_network = self.group.broadcast([tensor], dist.BroadcastOptions()) if self.group else None
        if not self.slots:
            return over_network
        if not self.slots.is_first:
            return Handle(partial(self.slots.take, tensor))
        if self.group is None or self.group.rank() == 0:  # the learner
            self.slots.lay_open(tensor)
            return Handle(over_network and over_network.wait, partial(self.slots.until_taken, self.slots.laid))
        return Handle(over_network.wait, partial(self.slots.lay_open, tensor))


class Handle:
    """The remaining steps of a message."""

    def __init__(self, *steps: Callable[[], object] | None):
        self._steps = [step for step in steps if step]

    def wait(self) -> None:
        while self._steps:
            self._steps.pop(0)()


class Slots:
    """Memory shared by ranks of a node. The first one exposes messages in it, in pieces; each of the others takes all of
    them."""

    def __init__(self, store: dist.Store, number: int, size: int, timeout: timedelta):
        """number: this rank's among the `size` ranks that share; 0 is the first. timeout: of each wait. Collective."""
        self.number, self.timeout, self._barrier = number, timeout.total_seconds(), Barrier()
        if self.is_first:
            file = os.memfd_create("rl-weights", os.MFD_CLOEXEC)
            os.ftruncate(file, PAGE + SLOTS * SLOT_BYTES)
            path = f"/proc/{os.getpid()}/fd/{file}"
            store.set("first", json.dumps([os.getpid(), path]))
            self._map(path)
            names = [f"open/{other}" for other in range(1, size)]  # set by ranks that have opened it
            self._others = dict(enumerate(map(int, store.multi_get(names)), 1))  # process ids, by number
            os.close(file)
        else:
            process, path = json.loads(store.get("first"))
            self._map(path)
            self._others = {0: process}
            store.set(f"open/{number}", str(os.getpid()))

    def _map(self, path: str) -> None:
        memory = torch.from_file(path, shared=True, size=PAGE + SLOTS * SLOT_BYTES, dtype=torch.uint8)
        self._words = memoryview(memory[:PAGE].numpy()).cast("Q")  # a word is read or written by a single load or store
        self._slots = memory[PAGE:].split(SLOT_BYTES)

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def laid(self) -> int:
        """The number of pieces exposed so far."""
        return self._words[LAID]

    def lay_open(self, data: torch.Tensor) -> None:
        """Expose the data to the others; wait while no slot is free."""
        for piece in _pieces(data):
            number = self.laid
            self.until_taken(number + 1 - SLOTS)
            self._slots[number % SLOTS][: len(piece)].copy_(piece)
            self._barrier()
            self._words[LAID] = number + 1

    def take(self, data: torch.Tensor) -> None:
        """Fill data with the next message of its length."""
        own = self.number * LINE
        for piece in _pieces(data):
            number = self._words[own]
            self._wait(lambda number=number: self.laid > number)
            piece.copy_(self._slots[number % SLOTS][: len(piece)])
            self._barrier()
            self._words[own] = number + 1

    def until_taken(self, count: int) -> None:
        """Return when each of the others has taken this many pieces."""
        self._wait(lambda: all(self._words[other * LINE] >= count for other in self._others))

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready` returns True. Raise RankLost if another process has exited, and TimeoutError after the
        timeout."""
        deadline = time.monotonic() + self.timeout
        while not wait(ready, LOOK_SECONDS):
            if (lost := [pid for pid in self._others.values() if not launch.is_alive(pid)]) and not ready():
                raise RankLost(f"connection lost: process {lost[0]}, with which weights are shared, has exited")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no weights went through shared memory in {self.timeout:g} s")
        self._barrier()


def _pieces(data: torch.Tensor) -> Sequence[torch.Tensor]:
    return data.view(-1).view(torch.uint8).split(SLOT_BYTES)

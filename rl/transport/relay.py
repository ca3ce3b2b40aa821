"""Samples between nodes: the records of a ring on a node without learners are sent into the ring of a node with learners.

    node that only generates                                  node with learners
    generators -> ring -> Forwarder (a thread)  == gloo ==>  Receiver (a thread each) -> ring -> the learners' inbox

Each record arrives once and in order. A connection that breaks ends the run, as the loss of a rank does. No record is taken
from a ring while the next ring is full, so back pressure reaches the generators. As with all of torch.distributed, nothing is
encrypted: the job must be able to trust the network between its nodes.
"""

from datetime import timedelta
from functools import partial

import torch
import xxhash
from torch.distributed import PrefixStore, Store

from rl.background import in_background
from rl.ranks import watchdog
from rl.ranks.device_groups import host_group
from rl.transport.ring import Ring, RingTimeout

RECORD_SECONDS = 0.1  # until a wait for a record looks for the end
END = -1  # instead of a record's size
RECEIVER, FORWARDER = 0, 1


def _join(store: Store, node: int, place: int):
    """Return the group of a node that sends and the one that receives. No time limit: the watchdog has one."""
    return host_group(PrefixStore(f"relay/{node}", store), place, 2, timedelta(days=7))


class Receiver:
    """The learners' end: puts the records of other nodes into its ring."""

    def __init__(self, ring: Ring, store: Store, senders: list[int]):
        """store: a connection of its own, because it waits there. senders: nodes that will connect."""
        self._address = ring.address
        self._moving = [in_background(partial(self._move, store, sender), "receiver") for sender in senders]

    def check(self) -> None:
        """Raise the errors of the connections."""
        for moving in self._moving:
            if moving.done():
                moving.result()

    def _move(self, store: Store, sender: int) -> None:
        """Put the records of a node into the ring until it has sent all."""
        group = _join(store, sender, RECEIVER)
        ring = Ring.attach(self._address)  # a Ring object is for one thread
        head = torch.empty(2, dtype=torch.long)
        while True:
            group.recv([head], FORWARDER, 0).wait()
            size, checksum = head.tolist()
            if size == END:
                break
            record = torch.empty(size, dtype=torch.uint8)
            group.recv([record], FORWARDER, 0).wait()
            if _checksum(record.numpy()) != checksum:
                raise RuntimeError("a record from another node does not fit its checksum")
            ring.put(record.numpy(), timeout=float("inf"))
        ring.close()
        group.send([head], FORWARDER, 0).wait()


class Forwarder:
    """The generators' end: takes the records out of the ring of this node and sends them to its receiver."""

    def __init__(self, ring: Ring, store: Store, node: int):
        """store: as for Receiver. node: this one."""
        self._ring = Ring.attach(ring.address)  # a Ring object is for one thread
        self._is_ending = False
        self._moving = in_background(partial(self._move, store, node), "forwarder")

    def check(self) -> None:
        """Raise the thread's error."""
        if self._moving.done():
            self._moving.result()

    def finish(self) -> None:
        """Return when all records of the ring, into which nobody writes any more, are in the ring of the other node."""
        self._is_ending = True
        self._moving.result()

    def _move(self, store: Store, node: int) -> None:
        group = _join(store, node, FORWARDER)
        while record := self._take():
            group.send([torch.tensor([len(record), _checksum(record)])], RECEIVER, 0).wait()
            group.send([torch.frombuffer(bytearray(record), dtype=torch.uint8)], RECEIVER, 0).wait()
            watchdog.progress()
        end = torch.tensor([END, 0])
        group.send([end], RECEIVER, 0).wait()
        group.recv([end], RECEIVER, 0).wait()  # when all records are in the other ring

    def _take(self) -> bytes | None:
        """Return the next record; None if there will be no other."""
        while True:
            is_ending = self._is_ending  # before the ring is looked at
            try:
                return self._ring.get(timeout=0 if is_ending else RECORD_SECONDS)
            except RingTimeout:
                if is_ending:
                    return None


def _checksum(record) -> int:
    return xxhash.xxh3_64_intdigest(record) >> 1  # fits into an int64

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
MOST_RECORDS = 64  # of a message, which has those that are there, each with a length above 0
MOST_BYTES = 1 << 20  # of a message with several records
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
        head = torch.empty(1 + MOST_RECORDS, dtype=torch.long)
        while True:
            group.recv([head], FORWARDER, 0).wait()
            checksum, *lengths = head.tolist()
            if not any(lengths):
                break
            data = torch.empty(sum(lengths), dtype=torch.uint8)
            group.recv([data], FORWARDER, 0).wait()
            if _checksum(data.numpy()) != checksum:
                raise RuntimeError("records from another node do not fit their checksum")
            for record in data.split([length for length in lengths if length]):
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
        if self._moving.done():
            self._moving.result()

    def finish(self) -> None:
        """Return when all records of the ring, into which nobody writes any more, are in the ring of the other node."""
        self._is_ending = True
        self._moving.result()

    def _move(self, store: Store, node: int) -> None:
        group = _join(store, node, FORWARDER)
        head = torch.zeros(1 + MOST_RECORDS, dtype=torch.long)
        while records := self._take():
            data = bytearray().join(records)
            head.zero_()
            head[: 1 + len(records)] = torch.tensor([_checksum(data), *map(len, records)])
            group.send([head], RECEIVER, 0).wait()
            group.send([torch.frombuffer(data, dtype=torch.uint8)], RECEIVER, 0).wait()
            watchdog.progress()
        group.send([head.zero_()], RECEIVER, 0).wait()
        group.recv([head], RECEIVER, 0).wait()  # when all records are in the other ring

    def _take(self) -> list[bytes]:
        """Return the next records; none if there will be no other."""
        records = []
        while len(records) < MOST_RECORDS and sum(map(len, records)) < MOST_BYTES:
            is_ending = self._is_ending  # before the ring is looked at
            try:
                records.append(self._ring.get(timeout=0 if is_ending or records else RECORD_SECONDS))
            except RingTimeout:
                if records or is_ending:
                    break
        return records


def _checksum(record) -> int:
    return xxhash.xxh3_64_intdigest(record) >> 1  # fits into an int64

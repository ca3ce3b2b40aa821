"""Messages from generators to learners, through their node's ring.

A message's first byte says what it is. Groups are framed by rl/samples/group.py; everything else is JSON. The first learner's
messages to all generators are in the control block (rl/samples/control.py).
"""

import json
import time
from collections import deque

from rl.errors import UserError
from rl.ranks import watchdog
from rl.ranks.timers import Timers
from rl.record.validations import Parts, Validation
from rl.samples.gather import all_gather_records
from rl.samples.group import Group
from rl.samples.ring_size import ring_mb_for
from rl.split import Split, SplitArgs
from rl.transport.bridge import senders
from rl.transport.relay import Forwarder, Receiver
from rl.transport.ring import RecordTooLarge, Ring, RingTimeout

GROUP, UNFINISHED, BATCH, ROWS, REPORT, SNAPSHOT, LAST = b"G", b"U", b"B", b"V", b"R", b"S", b"E"


def _open_ring(split: Split, megabytes: int) -> Ring | None:
    """Return this node's ring, which the first learner creates, or without learners the first generator. Return None on other
    learners, which get their samples from the first one, and if no sample would arrive."""
    key = f"ring/{split.node}"
    makes = split.is_first_here and (split.role == "learner" or not split.here.learners)
    if makes and (split.here.generators or _nodes_that_send(split)):
        ring = Ring.create(megabytes << 20)
        split.store.set(key, ring.address)
    elif split.role == "generator":
        ring = Ring.attach(split.store.get(key).decode())
    else:
        return None
    return ring


def _nodes_that_send(split: Split) -> list[int]:
    """Return the nodes without learners that send their samples to this one."""
    return [number for number, reader in senders(split.nodes).items() if reader == split.node != number]


class Outbox:
    """A generator's end. It never blocks: the learner that should make room may wait for this generator to receive weights."""

    def __init__(self, args: SplitArgs, split: Split):
        self.ring = _open_ring(split, args.ring_mb)
        self.split = split
        self._forwarder = None
        if split.is_first_here and not split.here.learners:
            self._forwarder = Forwarder(self.ring, split.store, split.node)
        self._queue: deque[tuple[bytes, bytes]] = deque()

    def send_group(self, group: Group) -> None:
        self._send(GROUP, group.to_bytes())

    def send_batch(self, groups: list[Group], metrics: dict[str, float], next_ticket: int) -> None:
        """Send a whole batch, with its generation metrics, and the first ticket of the next batch."""
        for group in groups:
            self.send_group(group)
        self._send_json(BATCH, {"groups": len(groups), "metrics": metrics, "next_ticket": next_ticket})

    def send_rows(self, step: int, version: int, rows: list[dict], parts: int = 1) -> None:
        """Send a validation of this version of the weights, published after that step. It is one of `parts`, each from a
        different generator, and each row is a record, because one record of all might not fit into the ring."""
        about = {"step": step, "version": version, "parts": parts}
        pieces = [[row] for row in rows] or [[]]
        for number, piece in enumerate(pieces, 1):
            self._send_json(ROWS, about | {"rows": piece, "more": number < len(pieces)})

    def report(self, timer: Timers, received: int) -> None:
        """Report this generator's time since the last report, and restart the timer. received: Subscriber.received."""
        content = {
            "elapsed": timer.elapsed,
            "ledger": timer.ledger(),
            "held": timer.seconds.get("held", 0.0),
            "publish_seconds": timer.seconds["update_weights"],
            "publish_gb": received / 1e9,
        }
        self._send_json(REPORT, content)
        timer.restart()

    def send_snapshot(self, step: int, unfinished: list[Group]) -> None:
        """Send this generator's unfinished groups, for the checkpoint of that step."""
        for group in unfinished:
            self._send(UNFINISHED, group.to_bytes())
        self._send_json(SNAPSHOT, {"step": step})

    def finish(self, unfinished: list[int]) -> None:
        """Send the final record, with the tickets that will not be finished. Return when all records have been handed over."""
        self._send_json(LAST, {"unfinished": unfinished})
        while self._queue:
            time.sleep(1e-3)
            self.flush()
        place = f"handed_over/{self.split.node}"
        handed_over = self.split.store.add(place, 1)
        while self._forwarder and handed_over < self.split.here.generators:
            time.sleep(1e-2)
            handed_over = self.split.store.add(place, 0)
        if self._forwarder:
            self._forwarder.wait(self.ring.counts["written"])

    def flush(self) -> None:
        """Hand over the records for which the ring has room. Raise UserError for a record that is too large for the ring."""
        if self._forwarder:
            self._forwarder.check()
        while self._queue:
            try:
                self.ring.put(*self._queue[0], timeout=0)
            except RingTimeout:
                break
            except RecordTooLarge as error:
                needed = ring_mb_for(sum(map(len, self._queue[0])))
                raise UserError(f"--ring-mb is too small: {error} bytes. Give --ring-mb {needed}.") from None
            self._queue.popleft()
            watchdog.progress()

    def _send_json(self, kind: bytes, content: dict) -> None:
        self._send(kind, json.dumps({"rank": self.split.ranks.rank, **content}).encode())

    def _send(self, kind: bytes, body: bytes) -> None:
        self._queue.append((kind, body))
        self.flush()


class Inbox:
    """The learners' end: the records that have arrived on any node, the same on every learner and in the same order."""

    def __init__(self, args: SplitArgs, split: Split):
        self.ring = _open_ring(split, args.ring_mb)
        self.generators = split.generators
        nodes = _nodes_that_send(split) if self.ring else []
        self._receiver = Receiver(self.ring, split.store, nodes) if nodes else None
        self.groups: deque[Group] = deque()
        self.batches: deque[dict] = deque()  # metrics of complete batches, whose groups are all in `groups`
        self.reports: list[dict] = []
        self.last_words: list[dict] = []
        self._unfinished: dict[int, Group] = {}  # groups of the snapshot that is being taken
        self._snapshots: list[dict] = []
        self.validations = Parts()

    def receive(self, seconds: float = 0.1) -> None:
        """Wait up to `seconds` for a record, and take all that have arrived. A collective of the learners."""
        records = []
        wait = seconds
        if self._receiver:
            self._receiver.check()
        while self.ring:
            try:
                records.append(self.ring.get(timeout=wait))
            except RingTimeout:
                break
            wait = 0.0
        for record in all_gather_records(records):
            self._sort(bytes(record[:1]), record[1:])

    def _sort(self, kind: bytes, body: memoryview) -> None:
        watchdog.progress()
        if kind in (GROUP, UNFINISHED):
            group = Group.from_bytes(body)
            if kind == GROUP:
                self.groups.append(group)
                self._unfinished.pop(group.ticket, None)  # it was finished after the snapshot
            else:
                self._unfinished[group.ticket] = group
            return
        content = json.loads(bytes(body))
        if kind == ROWS:
            self.validations.add(content)
        else:
            lists = {BATCH: self.batches, REPORT: self.reports, SNAPSHOT: self._snapshots, LAST: self.last_words}
            lists[kind].append(content)

    def wait_for_end(self) -> None:
        """Return when every generator has sent its final record. A collective."""
        while len(self.last_words) < self.generators:
            self.receive()

    def unfinished_at(self, step: int) -> list[Group]:
        """Return the unfinished groups of all generators, which were asked for them at this step. A collective."""
        while sum(snapshot["step"] == step for snapshot in self._snapshots) < self.generators:
            self.receive()
        out = list(self._unfinished.values())
        self._unfinished.clear()
        self._snapshots.clear()
        return out

    def take_validations(self, until: int | None = None) -> list[Validation]:
        """Return the complete validations, in order of step. With `until`, wait for that step's validation; then it is a
        collective."""
        while until is not None and until > self.validations.newest:
            self.receive()
        return self.validations.take()

"""Messages between generators and learners: records through their node's ring, and the first learner's state in the store.

A record's first byte says what it is. Groups are framed by rl/samples/group.py; everything else is JSON.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from rl.background import in_background
from rl.errors import UserError
from rl.ranks import launch, watchdog
from rl.ranks.timers import Timers
from rl.samples.group import Group, all_gather_records
from rl.split import Split
from rl.transport.bridge import senders
from rl.transport.ring import RecordTooLarge, Ring, RingTimeout

GROUP, UNFINISHED, BATCH, ROWS, REPORT, SNAPSHOT, LAST = b"G", b"U", b"B", b"V", b"R", b"S", b"E"
RING_BYTES = 4 << 30  # only the part in use takes memory; a record may take almost half


def _open_ring(split: Split) -> Ring | None:
    """Return this node's ring, which the first learner creates, or without learners the first generator. Return None on other
    learners, which get their samples from the first one, and if no sample would arrive."""
    key = f"ring/{split.node}"
    makes = split.is_first_here and (split.role == "learner" or not split.here.learners)
    if makes and (split.here.generators or _nodes_that_send(split)):
        ring = Ring.create(RING_BYTES)
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

    def __init__(self, split: Split):
        self.ring = _open_ring(split)
        self.split = split
        self._forwarder = None
        if split.is_first_here and not split.here.learners:
            from rl.transport.relay import Forwarder  # late: only a node without learners sends samples to another

            self._forwarder = Forwarder(self.ring, launch.open_store(timedelta(days=7)), split.node)
        self._queue: deque[tuple[bytes, bytes]] = deque()

    def send_group(self, group: Group) -> None:
        self._send(GROUP, group.to_bytes())

    def send_batch(self, groups: list[Group], left_out: list[Group], metrics: dict[str, float], next_ticket: int) -> None:
        """Send a whole batch, the groups left out of it, its generation metrics, and the first ticket of the next batch."""
        for group in (*groups, *left_out):
            self.send_group(group)
        counts = {"groups": len(groups), "left_out": len(left_out)}
        self._send_json(BATCH, counts | {"metrics": metrics, "next_ticket": next_ticket})

    def send_rows(self, step: int, version: int, rows: list[dict], parts: int = 1) -> None:
        """Send a validation of this version of the weights, published after that step. It is one of `parts`, each from a
        different generator."""
        self._send_json(ROWS, {"step": step, "version": version, "parts": parts, "rows": rows})

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
            self._forwarder.finish()

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
                remedy = "Lower --rollout-n or --max-response-length."
                raise UserError(f"a group is too large to be sent to the learners: {error} bytes. {remedy}") from None
            self._queue.popleft()
            watchdog.progress()

    def _send_json(self, kind: bytes, content: dict) -> None:
        self._send(kind, json.dumps({"rank": self.split.ranks.rank, **content}).encode())

    def _send(self, kind: bytes, body: bytes) -> None:
        self._queue.append((kind, body))
        self.flush()


class Parts:
    """Validations that arrive in parts, one from each generator."""

    def __init__(self):
        self.newest = -1  # the newest step whose validation has arrived whole
        self._parts: dict[int, list[dict]] = {}  # by step

    def add(self, part: dict) -> None:
        step = part["step"]
        self._parts.setdefault(step, []).append(part)
        if self._is_whole(step):
            self.newest = max(self.newest, step)

    def take(self) -> list[tuple[int, list[dict], int]]:
        """Return those that are whole, in order of step: the step after which these weights were published, a row per response
        in order of the prompts, and the weights' version."""
        out = []
        for step in sorted(step for step in self._parts if self._is_whole(step)):
            parts = self._parts.pop(step)
            rows = sorted((row for part in parts for row in part["rows"]), key=lambda row: row["index"])
            out += [(step, rows, parts[0]["version"])] if rows else []
        return out

    def skip_recorded(self, steps: Iterable[int]) -> None:
        """Skip validations that the record of a resumed run has already, perhaps since the checkpoint."""
        for step in steps:
            self._parts.pop(step, None)
            self.newest = max(self.newest, step)

    def state(self) -> dict:
        return {"validated": self.newest, "rows": [parts for step, parts in self._parts.items() if self._is_whole(step)]}

    def restore(self, state: dict) -> None:
        self.newest = state["validated"]
        self._parts = {parts[0]["step"]: parts for parts in state["rows"]}

    def _is_whole(self, step: int) -> bool:
        return len(self._parts[step]) == self._parts[step][0]["parts"]


class Inbox:
    """The learners' end: the records that have arrived on any node, the same on every learner and in the same order."""

    def __init__(self, split: Split):
        self.ring = _open_ring(split)
        self.generators = split.generators
        self._receiver = None
        if self.ring and (nodes := _nodes_that_send(split)):
            from rl.transport.relay import Receiver  # late: only nodes without learners send samples to another

            self._receiver = Receiver(self.ring, launch.open_store(timedelta(days=7)), nodes)
        self.groups: deque[Group] = deque()
        self.batches: deque[dict] = deque()  # metrics of complete batches, whose groups are all in `groups`
        self.reports: list[dict] = []
        self.last_words: list[dict] = []
        self._unfinished: dict[int, Group] = {}  # groups of the snapshot that is being taken
        self._snapshots: list[dict] = []
        self.validations = Parts()

    def receive(self) -> None:
        """Wait up to 0.1 s for a record, and take all that have arrived. A collective of the learners."""
        records = []
        wait = 0.1
        if self._receiver:
            self._receiver.check()
        while self.ring:
            try:
                records.append(self.ring.get(timeout=wait))
            except RingTimeout:
                break
            wait = 0.0
        for record in all_gather_records(records):
            watchdog.progress()
            kind = bytes(record[:1])
            if kind in (GROUP, UNFINISHED):
                group = Group.from_bytes(record[1:])
                if kind == GROUP:
                    self.groups.append(group)
                    self._unfinished.pop(group.ticket, None)  # it was finished after the snapshot
                else:
                    self._unfinished[group.ticket] = group
                continue
            content = json.loads(bytes(record[1:]))
            if kind == ROWS:
                self.validations.add(content)
            else:
                lists = {BATCH: self.batches, REPORT: self.reports, SNAPSHOT: self._snapshots, LAST: self.last_words}
                lists[kind].append(content)

    def unfinished_at(self, step: int) -> list[Group]:
        """Return the unfinished groups of all generators, which were asked for them at this step. A collective."""
        while sum(snapshot["step"] == step for snapshot in self._snapshots) < self.generators:
            self.receive()
        out = list(self._unfinished.values())
        self._unfinished.clear()
        self._snapshots.clear()
        return out

    def take_validations(self, until: int | None = None) -> list[tuple[int, list[dict], int]]:
        """Return the complete validations (`Parts.take`). With `until`, wait for that step's; then it is a collective."""
        while until is not None and until > self.validations.newest:
            self.receive()
        return self.validations.take()


@dataclass(frozen=True)
class State:
    """The first learner's message to all generators."""

    version: int  # version of the newest weights that are ready to be received
    dropped: int  # number of tickets dropped so far, for any reason: others may start in their place
    snapshot: int = 0  # the step whose checkpoint needs the unfinished groups
    stop: bool = False


class ControlBlock:
    """The first learner's states, numbered, in the store. In each generator a thread waits for the next one, so that reading
    the newest needs no round trip."""

    def __init__(self, split: Split):
        self.store = split.store
        self.writes = split.role == "learner" and split.ranks.is_main
        self.state: State | None = None
        self._number = 0  # of the state
        self._changed = threading.Condition()
        self._following = in_background(self._follow, "control") if split.role == "generator" else None

    def update(self, **changes) -> None:
        """Change fields of the state, which the first learner writes to the store."""
        new = replace(self.state or State(version=-1, dropped=0), **changes)
        if self.writes and new != self.state:
            self._number += 1
            self.store.set(f"control/{self._number}", json.dumps(asdict(new)))
        self.state = new

    def read(self, version: int = -1) -> State:
        """Return the newest state that has arrived here. Wait for one in which this version of the weights is ready."""
        with self._changed:
            while not (self.state and self.state.version >= version) and not self._following.done():
                self._changed.wait(1.0)  # signal handlers run in between
            if self._following.done():  # it has failed
                self._following.result()
            return self.state

    def _follow(self) -> None:
        store = self.store.clone()  # a separate connection, since a waiting call blocks all others
        store.set_timeout(timedelta(days=7))  # a step may take long; the watchdog has the limits
        while True:
            state = State(**json.loads(store.get(f"control/{self._number + 1}")))
            with self._changed:
                self._number += 1
                self.state = state
                self._changed.notify_all()

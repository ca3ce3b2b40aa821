"""What generators tell learners, through their node's ring: whole groups, validation rows, reports of what they did with their
time, and a goodbye. One byte says which; groups are framed by rl/batch.py, everything else is JSON.
"""

import json
import time
from collections import Counter, deque

from rl import dist, watchdog
from rl.batch import Group, join_records, split_records
from rl.errors import UserError
from rl.generator import validation_metrics
from rl.metrics import Run, Timers
from rl.rewards import ScoringPool
from rl.ring import RecordTooLarge, Ring, RingTimeout

GROUP, BATCH, ROWS, REPORT, GOODBYE = b"G", b"B", b"V", b"R", b"E"


def open_ring(split: dist.Split, megabytes: int) -> Ring | None:
    """This node's ring: its first learner makes it, its generators join. None on other learners, who get their samples from
    the first."""
    key = f"ring/{split.node}"
    if split.role == "generator":
        with watchdog.doing("the first learner to make the ring"):
            ring = Ring.attach(split.store.get(key).decode())
    elif split.ranks.rank % (split.learners // split.nodes):
        return None
    else:
        ring = Ring.create(megabytes << 20)
        split.store.set(key, ring.address)
    watchdog.show("ring", lambda: Ring.attach(ring.address).state())  # an end of its own: a Ring object is for one thread
    return ring


class Outbox:
    """A generator's end. It never blocks: a generator that waited for room could not take new weights, and the learner that
    makes room waits for just that."""

    def __init__(self, ring: Ring, split: dist.Split):
        self.ring, self.rank = ring, split.ranks.rank
        self._queue: deque[tuple[bytes, bytes]] = deque()
        watchdog.show("records that wait for room in the ring", lambda: f"{len(self._queue)}")

    def send_group(self, group: Group) -> None:
        self._send(GROUP, group.to_bytes())

    def send_batch(self, groups: list[Group], metrics: dict[str, float]) -> None:
        """A whole batch, with the metrics of its making."""
        for group in groups:
            self.send_group(group)
        self._send_json(BATCH, {"groups": len(groups), "metrics": metrics})

    def send_rows(self, step: int, rows: list[dict]) -> None:
        """This generator's part of the validation of that step's weights."""
        self._send_json(ROWS, {"step": step, "rows": rows})

    def report(self, timer: Timers, pool: ScoringPool, publish_bytes: int) -> None:
        """What this generator did since the last report, its last act being a publish; restarts the timer."""
        content = {
            "elapsed": timer.elapsed,
            "ledger": timer.ledger(),
            "events": dict(pool.events),
            "publish_seconds": timer.seconds["update_weights"],
            "publish_gb": publish_bytes / 1e9,
        }
        self._send_json(REPORT, content)
        timer.restart()

    def goodbye(self, unfinished: list[int]) -> None:
        """The last record: tickets that were started here and will not be finished. Returns when all has been handed over."""
        self._send_json(GOODBYE, {"unfinished": unfinished})
        with watchdog.doing("the last records to be taken"):
            while self._queue:
                time.sleep(1e-3)
                self.flush()

    def flush(self) -> None:
        """Hands over what there is room for. Raises UserError for a record for which there never will be."""
        while self._queue:
            try:
                self.ring.put(*self._queue[0], timeout=0)
            except RingTimeout:
                break
            except RecordTooLarge as error:
                raise UserError(f"a group does not fit into the ring: {error} bytes. Raise --ring-mb.") from None
            self._queue.popleft()
            watchdog.progress()
        watchdog.waits_for("room in the ring", bool(self._queue))

    def _send_json(self, kind: bytes, content: dict) -> None:
        self._send(kind, json.dumps({"rank": self.rank, **content}).encode())

    def _send(self, kind: bytes, body: bytes) -> None:
        self._queue.append((kind, body))
        self.flush()


class Inbox:
    """The learners' end: what has come in on any node, the same on every learner and in the same order."""

    def __init__(self, ring: Ring | None, split: dist.Split):
        self.ring, self.generators = ring, split.generators
        self.groups: deque[Group] = deque()
        self.batches: deque[dict] = deque()  # metrics of whole batches whose groups are all in `groups`
        self.reports: list[dict] = []
        self.goodbyes: list[dict] = []
        self._rows: dict[int, list[dict]] = {}  # step -> one record a generator

    def receive(self, seconds: float = 0.1) -> None:
        """Waits for a record, no longer than that, and takes all that are there. A collective of the learners."""
        records, wait = [], seconds
        with watchdog.doing("a record in the ring"):
            while self.ring:
                try:
                    with self.ring.get(timeout=wait) as record:
                        records.append(bytes(record.data))
                except RingTimeout:
                    break
                wait = 0.0
        for share in dist.all_gather_bytes(join_records(records)):
            for record in split_records(share):
                self._sort(record[:1], record[1:])

    def _sort(self, kind: bytes, body: bytes) -> None:
        watchdog.progress()
        if kind == GROUP:
            self.groups.append(Group.from_bytes(body))
            return
        content = json.loads(body)
        if kind == ROWS:
            self._rows.setdefault(content["step"], []).append(content)
        else:
            {BATCH: self.batches, REPORT: self.reports, GOODBYE: self.goodbyes}[kind].append(content)

    @property
    def occupancy(self) -> float:
        """Of this node's ring, 0 to 1."""
        return self.ring.occupancy if self.ring else 0.0

    def unfinished(self) -> list[int]:
        """Tickets that the generators gave up when they said goodbye."""
        return [ticket for goodbye in self.goodbyes for ticket in goodbye["unfinished"]]

    def validation(self, run: Run, table_rows: int, wait_for: int | None = None) -> dict[str, float]:
        """The metrics of a validation that all generators have finished, with the step whose weights it was of; empty if there
        is none. With `wait_for`, waits for that step's (a collective). Writes the first `table_rows` rows as a table."""
        while True:
            step = next((s for s, parts in self._rows.items() if len(parts) == self.generators), None)
            if step is not None:
                rows = [row for part in self._rows.pop(step) for row in part["rows"]]
                rows.sort(key=lambda row: row["index"])
                run.log_generations(step, rows[:table_rows])
            if wait_for is None or step == wait_for:
                return {} if step is None else validation_metrics(rows) | {"training/validated_step": step}
            self.receive()


class Watch:
    """Who waits for whom, out of the generators' reports and the learners' own timers."""

    def __init__(self, split: dist.Split):
        self.split = split
        self._waited, self._elapsed = Counter(), Counter()  # seconds by role, over the whole run
        self._events: dict[int, dict] = {}  # of each generator's scoring

    def metrics(self, reports: list[dict], timer: Timers) -> dict[str, float]:
        """Metrics of what was reported since the last call; empties the list."""
        own = timer.ledger()["wait"]
        out = {"fully_async/trainer/idle_ratio": own}
        self._count("learner", own, timer.elapsed)
        for report in reports:
            self._events[report["rank"]] = report["events"]
            self._count("generator", report["ledger"]["wait"], report["elapsed"])
            out |= {f"ledger/generator_{report['rank']}/{phase}": share for phase, share in report["ledger"].items()}
        if reports:
            total = sum(report["elapsed"] for report in reports)
            waited = sum(report["ledger"]["wait"] * report["elapsed"] for report in reports)
            seconds = max(report["publish_seconds"] for report in reports)
            out["fully_async/rollouter/idle_ratio"] = waited / total
            out |= {"publish/seconds": seconds, "publish/gb_per_s": reports[-1]["publish_gb"] / seconds}
        for kind in ("timeout", "error", "bad_value", "died"):
            out[f"reward/events/{kind}"] = sum(events.get(kind, 0) for events in self._events.values())
        reports.clear()
        return out

    def _count(self, role: str, share: float, elapsed: float) -> None:
        self._waited[role] += share * elapsed
        self._elapsed[role] += elapsed

    def words(self) -> str:
        """Which side has waited, and the split of a node's ranks that would balance them."""
        g, n = self.split.generators // self.split.nodes, (self.split.generators + self.split.learners) // self.split.nodes
        idle = {role: self._waited[role] / max(1e-9, self._elapsed[role]) for role in ("generator", "learner")}
        told = f"generators waited {idle['generator']:.0%} of the time, learners {idle['learner']:.0%}"
        if min(idle.values()) > 0.2:
            return f"{told}: they take turns. A higher --staleness-threshold, or fewer validations, let them overlap."
        work = {"generator": g * (1 - idle["generator"]), "learner": (n - g) * (1 - idle["learner"])}
        exact = n * work["generator"] / sum(work.values())
        best = min(n - 1, max(1, round(exact)))
        if best != g:
            return f"{told}: {best} generators to {n - best} learners would balance them (--generators {best})."
        return f"{told}: {g} to {n - g} is the best split of {n} ranks; {exact / (n - exact):.2f} to 1 would balance them."

"""What generators tell learners, through their node's ring: whole groups, validation rows, reports of what they did with their
time, and a goodbye. One byte says which; groups are framed by rl/batch.py, everything else is JSON.
"""

import json
import time
from collections import Counter, deque

from rl import dist, watchdog
from rl.balance import advice
from rl.batch import Group, join_records, split_records
from rl.errors import UserError
from rl.generator import event_metrics, validation_metrics
from rl.ring import RecordTooLarge, Ring, RingTimeout
from rl.run import Run
from rl.scoring import ScoringPool
from rl.timers import Timers

GROUP, UNFINISHED, BATCH, ROWS, REPORT, SNAPSHOT, GOODBYE = b"G", b"U", b"B", b"V", b"R", b"S", b"E"


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
    watchdog.show("ring", ring.state)
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

    def send_batch(self, groups: list[Group], metrics: dict[str, float], next_ticket: int) -> None:
        """A whole batch, with the metrics of its making and the first ticket of the batch after."""
        for group in groups:
            self.send_group(group)
        self._send_json(BATCH, {"groups": len(groups), "metrics": metrics, "next_ticket": next_ticket})

    def send_rows(self, step: int, rows: list[dict], parts: int = 1) -> None:
        """Validation of that step's weights, in so many parts from as many generators."""
        self._send_json(ROWS, {"step": step, "rows": rows, "parts": parts})

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

    def send_snapshot(self, step: int, unfinished: list[Group]) -> None:
        """What is under way here, for the checkpoint of that step."""
        for group in unfinished:
            self._send(UNFINISHED, group.to_bytes())
        self._send_json(SNAPSHOT, {"step": step})

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
        self._unfinished: dict[int, Group] = {}  # of the snapshot that is being taken
        self._snapshots: list[dict] = []
        self.validated = -1  # the newest step whose validation has come whole
        self._rows: dict[int, list[dict]] = {}  # validations: step -> its parts that have come

    def receive(self, seconds: float = 0.1) -> None:
        """Waits for a record, no longer than that, and takes all that are there. A collective of the learners."""
        records, wait = [], seconds
        with watchdog.doing("a record in the ring"):
            while self.ring:
                try:
                    with self.ring.get(timeout=wait) as data:
                        records.append(bytes(data))
                except RingTimeout:
                    break
                wait = 0.0
        for share in dist.all_gather_bytes(join_records(records)):
            for record in split_records(share):
                self._sort(record[:1], record[1:])

    def _sort(self, kind: bytes, body: bytes) -> None:
        watchdog.progress()
        if kind in (GROUP, UNFINISHED):
            group = Group.from_bytes(body)
            if kind == GROUP:
                self.groups.append(group)
                self._unfinished.pop(group.ticket, None)  # it has come after the snapshot
            else:
                self._unfinished[group.ticket] = group
            return
        content = json.loads(body)
        if kind == ROWS:
            parts = self._rows.setdefault(content["step"], [])
            parts.append(content)
            if len(parts) == content["parts"]:
                self.validated = max(self.validated, content["step"])
        else:
            places = {BATCH: self.batches, REPORT: self.reports, SNAPSHOT: self._snapshots, GOODBYE: self.goodbyes}
            places[kind].append(content)

    def unfinished_at(self, step: int) -> list[Group]:
        """What is under way in all generators, which have been told to say so for this step: waits for them. Nothing of it is
        in `groups`."""
        with watchdog.doing("the generators to say what is under way"):
            while sum(snapshot["step"] == step for snapshot in self._snapshots) < self.generators:
                self.receive()
        out = list(self._unfinished.values())
        self._unfinished.clear()
        self._snapshots.clear()
        return out

    @property
    def occupancy(self) -> float:
        """Of this node's ring, 0 to 1."""
        return self.ring.occupancy if self.ring else 0.0

    def state(self) -> dict:
        """For a checkpoint: validations, besides `groups`."""
        whole = [parts for parts in self._rows.values() if len(parts) == parts[0]["parts"]]
        return {"validated": self.validated, "rows": whole}

    def restore(self, state: dict) -> None:
        self.validated = state["validated"]
        self._rows = {parts[0]["step"]: parts for parts in state["rows"]}

    def unfinished(self) -> list[int]:
        """Tickets that the generators gave up when they said goodbye."""
        return [ticket for goodbye in self.goodbyes for ticket in goodbye["unfinished"]]

    def validation(self, run: Run, table_rows: int, wait_for: int | None = None) -> dict[str, float]:
        """The metrics of the newest validation that has come whole since the last call, with the step whose weights it was of;
        empty if there is none. With `wait_for`, waits until that step's has come (a collective). Writes the first `table_rows`
        rows as a table."""
        while wait_for is not None and wait_for > self.validated:
            self.receive()
        metrics = {}
        for step in [step for step, parts in self._rows.items() if len(parts) == parts[0]["parts"]]:
            rows = [row for part in self._rows.pop(step) for row in part["rows"]]
            rows.sort(key=lambda row: row["index"])
            run.log_generations(step, rows[:table_rows])
            run.warn_unscored([row["error"] for row in rows if row["error"]])
            metrics = validation_metrics(rows) | {"training/validated_step": step}
        return metrics


class Watch:
    """Who waits for whom, out of the generators' reports and the learners' own timers. The advice leaves out each rank's first
    report: it covers start-up, where ranks wait for engines and models to load."""

    def __init__(self, split: dist.Split):
        self.split = split
        self._waited, self._elapsed = Counter(), Counter()  # seconds by role, over the whole run
        self._events: dict[int, dict] = {}  # of each generator's scoring
        self._events_before: Counter[str] = Counter()  # of the run that goes on here
        self._started: set[tuple[str, int]] = set()  # ranks that have reported their start-up

    def metrics(self, reports: list[dict], timer: Timers) -> dict[str, float]:
        """Metrics of what was reported since the last call; empties the list."""
        own = timer.ledger()["wait"]
        out = {"fully_async/trainer/idle_ratio": own}
        self._count("learner", 0, own, timer.elapsed)
        for report in reports:
            self._events[report["rank"]] = report["events"]
            self._count("generator", report["rank"], report["ledger"]["wait"], report["elapsed"])
            out |= {f"ledger/generator_{report['rank']}/{phase}": share for phase, share in report["ledger"].items()}
        if reports:
            total = sum(report["elapsed"] for report in reports)
            waited = sum(report["ledger"]["wait"] * report["elapsed"] for report in reports)
            seconds = max(report["publish_seconds"] for report in reports)
            out["fully_async/rollouter/idle_ratio"] = waited / total
            out |= {"publish/seconds": seconds, "publish/gb_per_s": reports[-1]["publish_gb"] / seconds}
        reports.clear()
        return out | event_metrics(self.events)

    @property
    def events(self) -> Counter:
        """Of all scoring since the run began."""
        return sum(map(Counter, self._events.values()), self._events_before)

    def state(self) -> dict:
        """For a checkpoint."""
        return {"waited": self._waited, "elapsed": self._elapsed, "events": self.events}

    def restore(self, state: dict) -> None:
        self._waited, self._elapsed = Counter(state["waited"]), Counter(state["elapsed"])
        self._events_before = Counter(state["events"])

    def _count(self, role: str, rank: int, share: float, elapsed: float) -> None:
        if (role, rank) in self._started:
            self._waited[role] += share * elapsed
            self._elapsed[role] += elapsed
        self._started.add((role, rank))

    def words(self) -> str:
        """Which side has waited, and the split of the job's ranks that would balance them."""
        if not (self._elapsed["generator"] and self._elapsed["learner"]):
            return "too few steps to say who waits for whom"
        idle = [self._waited[role] / self._elapsed[role] for role in ("generator", "learner")]
        return advice(self.split.generators, self.split.learners, self.split.nodes, *idle)

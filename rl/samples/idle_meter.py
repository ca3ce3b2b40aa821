"""Who waits for whom in a split job, out of the generators' reports and the learners' own timers."""

from collections import Counter

from rl.ranks.timers import Timers
from rl.record.balance import has_choice, verdict
from rl.rewards.pool import event_metrics
from rl.split import Split


class IdleMeter:
    """Who waits for whom, out of the generators' reports and the learners' own timers. The advice leaves out each rank's first
    report: it covers start-up, where ranks wait for engines and models to load."""

    def __init__(self, split: Split):
        self.split = split
        self._waited, self._elapsed = Counter(), Counter()  # seconds by role, over the whole run
        self._events: dict[int, dict] = {}  # of each generator's scoring
        self._events_before: Counter[str] = Counter()  # of the run that resumes here
        self._started: set[tuple[str, int]] = set()  # ranks that have reported their start-up
        self._advised: str | int | None = None  # in the last `news`

    def metrics(self, reports: list[dict], timer: Timers) -> dict[str, float]:
        """Metrics of what was reported since the last call; empties the list."""
        own = timer.ledger()["wait"]
        out = {"fully_async/trainer/idle_ratio": own}
        self._count("learner", 0, own, timer.elapsed)
        self.read(reports)
        for report in reports:
            out |= {f"ledger/generator_{report['rank']}/{phase}": share for phase, share in report["ledger"].items()}
        if reports:
            total = sum(report["elapsed"] for report in reports)
            waited = sum(report["ledger"]["wait"] * report["elapsed"] for report in reports)
            seconds = max(report["publish_seconds"] for report in reports)
            out["fully_async/rollouter/idle_ratio"] = waited / total
            out["fully_async/rollouter/held_ratio"] = sum(report.get("held", 0.0) for report in reports) / total
            newest = reports[-1]
            way = max(seconds, newest["publish_way"])  # longer where the engine continues while weights arrive
            size = newest["publish_gb"]
            out |= {"publish/seconds": seconds, "publish/gb": size, "publish/gb_per_s": size / way}
        reports.clear()
        return out | event_metrics(self.events)

    def read(self, reports: list[dict]) -> None:
        """Takes what the summary and the events are made of."""
        for report in reports:
            self._events[report["rank"]] = report["events"]
            self._count("generator", report["rank"], report["ledger"]["wait"], report["elapsed"])

    @property
    def events(self) -> Counter:
        """Counts of what could not be scored since the run began."""
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

    def news(self) -> str:
        """Advice to split the ranks differently, if it differs from that of the last call."""
        advised, text = self._verdict()
        is_new = advised not in (None, self._advised)
        self._advised = advised
        is_advice = advised not in ("balanced", self.split.generators)
        return text if is_new and is_advice and self._has_choice() else ""

    def last_words(self) -> list[str]:
        """The summary at the end of a run, without a verdict on the split where there is only one; none of too few steps."""
        advised, text = self._verdict()
        return [] if advised is None else [text if self._has_choice() or advised == "turns" else text.partition(":")[0]]

    def _verdict(self) -> tuple[str | int | None, str]:
        """What rl/record/balance.py says of the shares so far; (None, "") after too few steps."""
        if not (self._elapsed["generator"] and self._elapsed["learner"]):
            return None, ""
        idle = [self._waited[role] / self._elapsed[role] for role in ("generator", "learner")]
        return verdict(self.split.generators, self.split.learners, self._nodes_alike(), *idle)

    def _nodes_alike(self) -> int | None:
        nodes = self.split.nodes
        return len(nodes) if len({(node.size, node.generators) for node in nodes}) == 1 else None

    def _has_choice(self) -> bool:
        return has_choice(self.split.generators, self.split.learners, self._nodes_alike())

"""Idle times in a split job (who waits for whom), from the generators' reports and the learners' own timers."""

from collections import Counter

from rl.ranks.timers import Timers
from rl.record.balance import verdict
from rl.split import Split


class IdleMeter:
    """A collector of the reports. The advice leaves out each rank's first report, which covers the start."""

    def __init__(self, split: Split):
        self.split = split
        self._waited, self._elapsed = Counter(), Counter()  # seconds by role over the whole run, and for "scores"
        self._started: set[tuple[str, int]] = set()  # ranks that have reported their start-up
        self._advised: str | int | None = None  # the advice in the last `news`

    def metrics(self, reports: list[dict], timer: Timers) -> dict[str, float]:
        """Return the metrics of the reports since the last call, and empty the list."""
        own = timer.ledger()["wait"]
        out = {"fully_async/trainer/idle_ratio": own}
        self._count("learner", 0, timer.elapsed, learner=own)
        self.read(reports)
        for report in reports:
            out |= {f"ledger/generator_{report['rank']}/{phase}": share for phase, share in report["ledger"].items()}
        if reports:
            total = sum(report["elapsed"] for report in reports)
            waited = sum(report["ledger"]["wait"] * report["elapsed"] for report in reports)
            seconds = max(report["publish_seconds"] for report in reports)
            out["fully_async/rollouter/idle_ratio"] = waited / total
            out["fully_async/rollouter/held_ratio"] = sum(report.get("held", 0.0) for report in reports) / total
            size = reports[-1]["publish_gb"]
            out |= {"publish/seconds": seconds, "publish/gb": size, "publish/gb_per_s": size / seconds}
        reports.clear()
        return out

    def read(self, reports: list[dict]) -> None:
        """Count the reports for the summary."""
        for report in reports:
            ledger = report["ledger"]
            self._count("generator", report["rank"], report["elapsed"], generator=ledger["wait"], scores=ledger["score"])

    def state(self) -> dict:
        return {"waited": self._waited, "elapsed": self._elapsed}

    def restore(self, state: dict) -> None:
        self._waited, self._elapsed = Counter(state["waited"]), Counter(state["elapsed"])

    def _count(self, role: str, rank: int, elapsed: float, **shares: float) -> None:
        if (role, rank) in self._started:
            self._waited.update({what: share * elapsed for what, share in shares.items()})
            self._elapsed[role] += elapsed
        self._started.add((role, rank))

    def news(self) -> str:
        """Return advice to change something if it is new; else an empty string."""
        advised, text = self._verdict()
        is_new = advised not in (None, self._advised)
        self._advised = advised
        is_advice = advised not in ("balanced", self.split.generators)
        return text if is_new and is_advice else ""

    def last_words(self) -> list[str]:
        """Return the summary for the end of a run; an empty list after too few steps."""
        _, text = self._verdict()
        return [text] if text else []

    def _verdict(self) -> tuple[str | int | None, str]:
        """Return the advice of rl/record/balance.py on the shares so far; (None, "") after too few steps."""
        if not (self._elapsed["generator"] and self._elapsed["learner"]):
            return None, ""
        idle = [self._waited[role] / self._elapsed[role] for role in ("generator", "learner")]
        scoring = self._waited["scores"] / self._elapsed["generator"]
        return verdict(self.split.generators, self.split.learners, self._nodes_alike(), *idle, scoring)

    def _nodes_alike(self) -> int | None:
        nodes = self.split.nodes
        return len(nodes) if len({(node.size, node.generators) for node in nodes}) == 1 else None

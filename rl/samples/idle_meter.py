"""Idle times in a split job (who waits for whom), from the generators' reports and the learners' own timers."""

from rl.ranks.timers import Timers


class IdleMeter:
    """A collector of the reports."""

    def metrics(self, reports: list[dict], timer: Timers) -> dict[str, float]:
        """Return the metrics of the reports since the last call, and empty the list."""
        own = timer.ledger()["wait"]
        out = {"fully_async/trainer/idle_ratio": own}
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

"""The groups that have arrived, in the order in which they may be trained. Groups that are too old or flat are dropped here."""

from collections import Counter

from rl.samples.group import Group
from rl.samples.split_schedule import AsyncSchedule


class SampleBuffer:
    """The groups that have arrived. A step trains the oldest ones. Every learner has the same buffer."""

    def __init__(self, schedule: AsyncSchedule, filter_groups: bool = False, max_num_gen_batches: int = 10):
        self.schedule = schedule
        self.waiting: dict[int, Group] = {}
        self.trained = 0
        self.dropped: Counter[str] = Counter()  # tickets by reason: "stale", "filtered"
        self.gone: dict[str, list[int]] = {}  # tickets dropped since the last step, by reason
        self.left_out: dict[str, list[Group]] = {}  # their groups, for the record
        # settled tickets: all below _low, and those in _high
        self._low = 0
        self._high = set()
        self._flat_left = self._flat_limit = (max_num_gen_batches - 1) * schedule.prompts_per_step if filter_groups else 0

    def add(self, group: Group) -> None:
        """Add a group. With --filter-groups, drop it if it has no signal, unless the step has already lost too many groups."""
        if group.ticket in self.waiting or group.ticket in self._high or group.ticket < self._low:
            raise RuntimeError(f"ticket {group.ticket} arrived twice")
        if self._flat_left and not (group.differs or group.lacks_scores):
            self._flat_left -= 1
            self._drop(group, "filtered")
        else:
            self.waiting[group.ticket] = group

    def next(self, step: int) -> list[Group]:
        """Return the groups of step `step` (from 1), or none while there are not enough."""
        schedule = self.schedule
        if schedule.max_staleness is not None:
            oldest = schedule.version_at(step) - schedule.max_staleness
            for group in [group for group in self.waiting.values() if group.oldest < oldest and not group.lacks_scores]:
                del self.waiting[group.ticket]
                self._drop(group, "stale")
        tickets = sorted(self.waiting)[: schedule.prompts_per_step]
        return [self.waiting[ticket] for ticket in tickets] if len(tickets) == schedule.prompts_per_step else []

    def take(self, step: int) -> list[Group]:
        """Return what `next` returns, to be trained."""
        groups = self.next(step)
        for group in groups:
            del self.waiting[group.ticket]
            self._settle(group.ticket)
        self.trained += len(groups)
        self._flat_left = self._flat_limit
        return groups

    def take_gone(self) -> dict[str, list[int]]:
        """Return the tickets that were dropped since the last call, by reason."""
        gone = self.gone
        self.gone = {}
        return gone

    def take_left_out(self) -> dict[str, list[Group]]:
        """Return the groups that were dropped since the last call, by reason."""
        left_out = self.left_out
        self.left_out = {}
        return left_out

    @property
    def replaced(self) -> int:
        """The number of tickets dropped: others may start in their place."""
        return self.dropped.total()

    def metrics(self, started: int) -> dict[str, int]:
        """Return verl's fully_async/count/*. started: number of tickets that all generators have started."""
        return {
            "fully_async/count/started_samples": started,
            "fully_async/count/trained_samples": self.trained,
            "fully_async/count/dropped_stale_samples": self.dropped["stale"],
            "fully_async/count/filtered_samples": self.dropped["filtered"],
            "fully_async/count/max_required_samples": self.schedule.quota(0),
            "fully_async/count/staleness_samples": started - self.trained - self.dropped.total(),
            "fully_async/count/queue_samples": len(self.waiting),
        }

    def account(self, unfinished: list[int], started: int) -> str:
        """Return one line that accounts for every ticket. unfinished: tickets that the generators gave up. Raise RuntimeError
        if any is lost."""
        in_flight = len(self.waiting) + len(unfinished)
        dropped = self.dropped.total()
        line = f"{started:,} tickets started = {self.trained:,} trained + {dropped:,} dropped + {in_flight:,} in flight"
        if started != self.trained + dropped + in_flight:
            raise RuntimeError(f"tickets were lost: {line.replace('=', 'is not')}")
        return line

    def state(self) -> dict:
        """Return the state for a checkpoint, which also holds the groups in `waiting`."""
        names = ("trained", "dropped", "gone", "_low", "_flat_left")
        return {name: getattr(self, name) for name in names} | {"_high": sorted(self._high)}

    def restore(self, state: dict, groups: list[Group], drawn: int) -> list[int]:
        """Restore `state` and the waiting groups. Return the tickets that were under way, among the first `drawn` ones."""
        for name, value in state.items():
            setattr(self, name, value)
        self._high = set(self._high)
        self.dropped = Counter(self.dropped)
        self.waiting = {group.ticket: group for group in groups}
        return [t for t in range(self._low, drawn) if t not in self._high and t not in self.waiting]

    def _drop(self, group: Group, reason: str) -> None:
        self.dropped[reason] += 1
        self.gone.setdefault(reason, []).append(group.ticket)
        self.left_out.setdefault(reason, []).append(group)
        self._settle(group.ticket)

    def _settle(self, ticket: int) -> None:
        self._high.add(ticket)
        while self._low in self._high:
            self._high.remove(self._low)
            self._low += 1

"""Groups that have arrived, in the order in which they may be trained. Groups that are too old or flat are dropped here."""

from collections import Counter
from collections.abc import Callable, Sequence

from rl.ranks import watchdog
from rl.samples.group import Group
from rl.samples.schedule import ScheduleArgs


class SampleBuffer:
    """The groups that have arrived, and which of them a step trains: the oldest first. Every learner holds the same."""

    def __init__(
        self, args: ScheduleArgs, filter_groups: bool = False, max_num_gen_batches: int = 10, rewards: Sequence[str] = ()
    ):
        """rewards: by which groups are judged, where they are named (Group.differs)."""
        self.args, self._rewards = args, rewards
        self.waiting: dict[int, Group] = {}
        watchdog.show("groups for the next step", lambda: f"{len(self.waiting)} of {args.prompts_per_step}")
        self.trained = 0
        self.dropped: Counter[str] = Counter()  # tickets by reason: "stale", "filtered"
        self.skipped = 0  # tickets that never start (--prompt-sampling)
        self.gone: dict[str, list[int]] = {}  # the dropped and the skipped tickets, since the last step
        self.observe: Callable[[Group], None] = lambda group: None  # called with each trained or filtered group
        self._low, self._high = 0, set()  # tickets dealt with: all below, and these
        self._bounds: list[int] = []  # by version: only tickets below may have started under it, or before
        self._flat_left = self._flat_limit = (max_num_gen_batches - 1) * args.prompts_per_step if filter_groups else 0

    def add(self, group: Group) -> None:
        """Add a group. With --filter-groups drop it if it has no signal, unless the step has lost too many groups already."""
        if group.ticket in self.waiting or group.ticket in self._high or group.ticket < self._low:
            raise RuntimeError(f"ticket {group.ticket} arrived twice")
        if self._flat_left and not group.differs(self._rewards):
            self._flat_left -= 1
            self._drop(group.ticket, "filtered")
            self.observe(group)
        else:
            self.waiting[group.ticket] = group

    def skip(self, ticket: int) -> None:
        """Settle a ticket that will not start. It makes room for another."""
        self.skipped += 1
        self.gone.setdefault("skipped", []).append(ticket)
        self._settle(ticket)

    def published(self, version: int) -> None:
        """Note that this version has been announced: no ticket starts under an earlier one any more."""
        # A run that ended in the middle of a publish period has one version more than it resumes with if it gets more steps
        del self._bounds[version:]
        while len(self._bounds) < version:
            self._bounds.append(self.args.quota(len(self._bounds)) + self.replaced)

    def take(self, step: int) -> list[Group] | None:
        """Return the groups of step `step` (from 1), or None while there are not enough."""
        args, version = self.args, self.args.version_at(step)
        if args.max_staleness is not None and args.on_stale == "drop":
            for ticket in [t for t, group in self.waiting.items() if version - group.oldest > args.max_staleness]:
                del self.waiting[ticket]
                self._drop(ticket, "stale")
        tickets = sorted(self.waiting)[: args.prompts_per_step]
        if len(tickets) < args.prompts_per_step or not self._in_time(step, tickets):
            return None
        groups = [self.waiting.pop(ticket) for ticket in tickets]
        for group in groups:
            self._settle(group.ticket)
            self.observe(group)
        self.trained += len(groups)
        self._flat_left = self._flat_limit
        return groups

    def take_gone(self) -> dict[str, list[int]]:
        """Return the tickets that were dropped since the last call, by reason."""
        gone, self.gone = self.gone, {}
        return gone

    @property
    def replaced(self) -> int:
        """The number of tickets that are not trained, so that others may start in their place."""
        return self.dropped.total() + self.skipped

    @property
    def low(self) -> int:
        """All tickets below are dealt with."""
        return self._low

    @property
    def newest(self) -> int:
        """The highest ticket dealt with so far."""
        return max(self._high, default=self._low - 1)

    def metrics(self, started: int) -> dict[str, int]:
        """verl's fully_async/count/*. started: tickets that all generators have started."""
        return {
            "fully_async/count/started_samples": started,
            "fully_async/count/trained_samples": self.trained,
            "fully_async/count/dropped_stale_samples": self.dropped["stale"],
            "fully_async/count/filtered_samples": self.dropped["filtered"],
            "fully_async/count/max_required_samples": self.args.quota(0),
            "fully_async/count/staleness_samples": started - self.trained - self.dropped.total(),
            "fully_async/count/queue_samples": len(self.waiting),
        }

    def account(self, unfinished: list[int], started: int) -> str:
        """Return one line on every ticket's fate. unfinished: given up by the generators. Raise RuntimeError if one is lost."""
        in_flight, dropped = len(self.waiting) + len(unfinished), self.dropped.total()
        line = f"{started:,} tickets started = {self.trained:,} trained + {dropped:,} dropped + {in_flight:,} in flight"
        if started != self.trained + dropped + in_flight:
            raise RuntimeError(f"tickets were lost: {line.replace('=', 'is not')}")
        return line + (f"; {self.skipped:,} more were skipped (--prompt-sampling)" if self.skipped else "")

    def _in_time(self, step: int, tickets: list[int]) -> bool:
        """Return whether, with --on-stale wait, all groups that these tickets leave over can still be trained in time: groups
        that started under version v or before (tickets below a bound) before version v + max_staleness + 1."""
        args = self.args
        if args.max_staleness is None or args.on_stale == "drop":
            return True
        version = args.version_at(step)
        for started_under in range(max(0, version - args.max_staleness), version + 1):
            known = started_under < len(self._bounds)
            bound = self._bounds[started_under] if known else args.quota(started_under) + self.replaced
            left = bound - min(bound, self._low) - sum(t < bound for t in self._high) - sum(t < bound for t in tickets)
            steps_left = (started_under + args.max_staleness + 1) * args.publish_every - step
            if left > steps_left * args.prompts_per_step:
                return False
        return True

    def state(self) -> dict:
        """For a checkpoint, with the groups in `waiting`."""
        names = ("trained", "dropped", "skipped", "gone", "_low", "_bounds", "_flat_left")
        return {name: getattr(self, name) for name in names} | {"_high": sorted(self._high)}

    def restore(self, state: dict, groups: list[Group], drawn: int) -> list[int]:
        """Restore `state` and the waiting groups. Return the tickets that were under way, of `drawn` in all."""
        for name, value in state.items():
            setattr(self, name, value)
        self._high, self.dropped = set(self._high), Counter(self.dropped)
        self.waiting = {group.ticket: group for group in groups}
        return [t for t in range(self._low, drawn) if t not in self._high and t not in self.waiting]

    def skipped_below(self, drawn: int) -> int:
        """Return how many of the skipped tickets are below `drawn`. From there on only skipped ones have been dealt with."""
        return self.skipped - max(0, self._low - drawn) - sum(ticket >= drawn for ticket in self._high)

    def _drop(self, ticket: int, reason: str) -> None:
        self.dropped[reason] += 1
        self.gone.setdefault(reason, []).append(ticket)
        self._settle(ticket)

    def _settle(self, ticket: int) -> None:
        self._high.add(ticket)
        while self._low in self._high:
            self._high.remove(self._low)
            self._low += 1

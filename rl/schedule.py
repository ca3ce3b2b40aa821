"""The async schedule: which ticket may start when, and which groups are trained next.

A ticket is a place in the endless prompt order, drawn from one counter in torchrun's store. The k-th ticket (k from 0) may
start under the weights of version v only if

    k - dropped < (v + 1 + staleness_threshold) * prompts_per_step * trigger_parameter_sync_step

where a publish comes after every trigger_parameter_sync_step steps (AReaL, arXiv 2505.24298, eq. 3; verl's fully async
flags). Threshold 0 with period 1 is on-policy, 1 is one step off.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated, Literal

from torch.distributed import Store

from rl import watchdog
from rl.batch import Group
from rl.channel import SplitArgs, State
from rl.errors import UserError
from rl.ranges import Range


class NextTicket:
    """The first ticket that no batch has taken, where batches are made whole, one after the other."""

    def __init__(self):
        self.ticket = 0
        self.under_way: list[int] = []  # before it

    def begin(self, count: int) -> range:
        """Moves on by `count` tickets, which are under way from now on; returns them."""
        started = range(self.ticket, self.ticket + count)
        self.ticket, self.under_way = started.stop, [*self.under_way, *started]
        return started

    def advance(self, ticket: int, groups: list[Group], under_way: Sequence[int] = ()) -> list[int]:
        """Moves on to `ticket`; returns those before it that are neither among the groups of a batch nor under way, since the
        last call."""
        passed = {*range(self.ticket, ticket), *self.under_way}
        self.ticket, self.under_way = ticket, [*under_way]
        return sorted(passed - {group.ticket for group in groups} - {*under_way})

    def state(self) -> dict:
        return {"ticket": self.ticket, "under_way": self.under_way}

    def restore(self, state: dict | int) -> None:
        """state: a number in older checkpoints, of runs that had nothing under way."""
        old = isinstance(state, int)
        self.ticket, self.under_way = (state, []) if old else (state["ticket"], state["under_way"])


@dataclass
class ScheduleArgs(SplitArgs):
    """The asynchronous schedule: batches, publishes of the weights, and the staleness of samples."""

    ppo_mini_batch_size: Annotated[int, Range(at_least=1)] = 8
    """Prompts per optimizer step, over all ranks; each has --rollout-n responses."""
    require_batches: Annotated[int, Range(at_least=1)] = 1
    """Mini-batches in a step. The step begins when all of them have arrived."""
    trigger_parameter_sync_step: Annotated[int, Range(at_least=1)] = 1
    """Steps from one publish of the weights to the next. A publish sends the learners' weights to the generators."""
    staleness_threshold: Annotated[float, Range(at_least=0, below=1_000_000)] = 1.0
    """How far generation may run ahead of training, in publish periods: 0 is on-policy, 1 is one step off. Fractions work."""
    partial_rollout: Literal["keep", "recompute", "off"] = "keep"
    """What happens to unfinished responses when new weights arrive. keep: they go on with their old KV cache; recompute: their
    KV cache is computed anew; off: the new weights wait until they have ended."""
    max_staleness: Annotated[int | None, Range(at_least=0)] = None
    """Age in versions of the oldest token that may be trained; each publish makes a version. By default
    --staleness-threshold alone bounds the age."""
    elastic_generators: str | None = None
    """HOST:PORT of the first learner at which generators may join and leave while the learners go on: torchrun jobs of their
    own, in which every rank generates (docs/nodes.md). The same for all."""
    stale: Literal["drop", "wait"] = "drop"
    """How --max-staleness is kept. drop: groups that are too old are dropped and replaced; wait: the learners wait for old
    groups before these get too old."""

    @property
    def prompts_per_step(self) -> int:
        return self.ppo_mini_batch_size * self.require_batches

    @property
    def prompts_per_update(self) -> int:
        return self.ppo_mini_batch_size

    @property
    def trains_stale(self) -> bool:
        return self.staleness_threshold > 0 or self.trigger_parameter_sync_step > 1

    def quota(self, version: int) -> int:
        """Tickets that may have started, the dropped ones not counted, under the weights of this version."""
        period = self.prompts_per_step * self.trigger_parameter_sync_step
        threshold = _exact(self.staleness_threshold)
        return (version + 1) * period + threshold.numerator * period // threshold.denominator

    def version_at(self, step: int) -> int:
        """The version of the weights that step `step` (from 1) begins with: how many publishes there were by then."""
        return (step - 1) // self.trigger_parameter_sync_step

    def publishes_after(self, step: int, total_steps: int) -> bool:
        return step == total_steps or step % self.trigger_parameter_sync_step == 0

    def step_of(self, version: int, total_steps: int) -> int:
        """The step after which this version of the weights is published."""
        return min(version * self.trigger_parameter_sync_step, total_steps)

    def check(self) -> None:
        """Raises UserError for settings that cannot work."""
        host, _, port = (self.elastic_generators or "host:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UserError(f"--elastic-generators {self.elastic_generators}: give HOST:PORT, such as node1:29600.")
        if self.stale == "wait" and self.max_staleness is not None and self.max_staleness < self.staleness_threshold:
            raise UserError(
                f"--stale wait cannot keep --max-staleness {self.max_staleness} with --staleness-threshold "
                f"{self.staleness_threshold}: more groups are started than can be trained in time. Raise the one, lower the "
                "other, or take --stale drop."
            )


@cache
def _exact(decimal: float) -> Fraction:
    """The number as it is written: 0.1 is a tenth. Kept, because generators ask between any two engine steps."""
    return Fraction(str(decimal))


class Draws:
    """Tickets that were drawn from the store's counters and have not started yet."""

    counter = "tickets/started"  # in the store

    def __init__(self, store: Store, again: list[int]):
        """again: tickets that go before all others."""
        self.store, self.again = store, again
        self.reserve: deque[int] = deque()

    def have(self, count: int, lists: int = 0) -> None:
        """Draws until so many are at hand, in one go. lists: of tickets to start again (rl/elastic_tickets.py)."""
        self.reserve.extend(self._draw(count - len(self.reserve)))

    def start(self) -> int:
        """The next ticket, which is at hand; it counts as started."""
        self.store.add(self.counter, 1)
        return self.reserve.popleft()

    def settle(self) -> None:
        """Returns when the store has counted all that have started."""

    def _draw(self, count: int) -> list[int]:
        drawn = []
        if self.again and count > 0:
            stop = self.store.add("tickets/taken_again", count)
            drawn = self.again[stop - count : stop]
            if stop >= len(self.again):
                self.again = []
        if (count := count - len(drawn)) > 0:
            stop = self.store.add("tickets/drawn", count)
            drawn += range(stop - count, stop)
        return drawn


class Tickets:
    """Hands a generator the tickets that may start there. It draws as many as it has room for, and keeps those that may not
    start yet.

    A generator has no more under way than an even share of what all may have: with many slots the first ones would take all
    that a publish lets start, and the others wait. Every ticket that may start finds a generator below its share. What is kept
    starts before all that is not drawn yet.
    """

    def __init__(
        self,
        store: Store,
        args: ScheduleArgs,
        total: int,
        engines: int = 1,
        make_draws: Callable[[Store, list[int]], Draws] = Draws,
    ):
        """total: tickets that will be trained in the whole run; engines: that share them; make_draws: for another way to the
        store's counters."""
        self.store, self.args, self.total = store, args, total
        self.engines = engines
        self.held = False  # whether the bound of staleness alone kept the last `take` from starting any
        opened = json.loads(store.get("tickets/opened"))
        self._draws = make_draws(store, opened["again"])
        self._unfinished: set[int] = set(opened["unfinished"])  # tickets of the run that goes on of which something is left

    def take(self, most: int, under_way: int, version: int, state: State) -> list[int]:
        """Up to so many tickets that may start under the weights of `version`, beside those under way here; none before the
        first weights, none if newer ones are ready, which would sample them better, and none if the run stops."""
        self.held = False
        if state.stop:
            self._draws.settle()
            return []
        share = -(-self.args.quota(0) // (len(state.engines or ()) or self.engines))
        most = max(0, min(most, share - under_way))
        self._draws.have(most, state.again)
        out: list[int] = []
        while 0 <= version == state.version and len(out) < most and self._may_start(version, state.dropped):
            out.append(self._draws.start())
        self.held = most > 0 and not out and 0 <= version == state.version and self._is_held(version, state.dropped)
        watchdog.waits_for("newer weights, before which no more tickets may start", most > 0 and not out)
        return out

    def partial(self, ticket: int) -> Group | None:
        """The ticket's responses as they were when the run was stopped."""
        return Group.from_bytes(self.store.get(f"tickets/unfinished/{ticket}")) if ticket in self._unfinished else None

    def _may_start(self, version: int, dropped: int) -> bool:
        """Whether the next ticket that was drawn may."""
        reserve = self._draws.reserve
        return bool(reserve) and reserve[0] - dropped < min(self.args.quota(version), self.total)

    def _is_held(self, version: int, dropped: int) -> bool:
        """Whether the next ticket that was drawn may start under newer weights, and not under these. False where none has been
        drawn yet, or all that will be trained have started."""
        reserve = self._draws.reserve
        return bool(reserve) and self.args.quota(version) <= reserve[0] - dropped < self.total


def open_tickets(
    store: Store, drawn: int = 0, started: int = 0, again: Sequence[int] = (), unfinished: Iterable[Group] = ()
) -> None:
    """Sets the counters of a run that begins, or goes on with these; to be called once. Generators wait for it.

    again: tickets that were drawn and are nowhere; unfinished: those of them whose responses go on.
    """
    store.add("tickets/drawn", drawn)
    store.add("tickets/started", started)
    of = {group.ticket: group for group in unfinished}
    for ticket, group in of.items():
        store.set(f"tickets/unfinished/{ticket}", group.to_bytes())
    store.set("tickets/opened", json.dumps({"again": list(again), "unfinished": list(of)}))


def drawn(store: Store) -> int:
    """Tickets that all generators have drawn."""
    return store.add("tickets/drawn", 0)


def started(store: Store) -> int:
    """Tickets that all generators have started."""
    return store.add("tickets/started", 0)


class SampleBuffer:
    """The groups that have come in, and which of them a step trains: the oldest first. Every learner holds the same."""

    def __init__(self, args: ScheduleArgs, filter_groups: bool = False, max_num_gen_batches: int = 10):
        self.args = args
        self.waiting: dict[int, Group] = {}
        watchdog.show("groups for the next step", lambda: f"{len(self.waiting)} of {args.prompts_per_step}")
        self.trained = 0
        self.dropped: Counter[str] = Counter()  # tickets by reason: "stale", "filtered"
        self.gone: dict[str, list[int]] = {}  # the same tickets, since the last step
        self._low, self._high = 0, set()  # tickets dealt with: all below, and these
        self._bounds: list[int] = []  # by version: only tickets below may have started under it, or before
        self._flat_left = self._flat_limit = (max_num_gen_batches - 1) * args.prompts_per_step if filter_groups else 0

    def add(self, group: Group) -> None:
        """Takes a group in; with --filter-groups one without signal is dropped, unless a step has lost too many."""
        if group.ticket in self.waiting or group.ticket in self._high or group.ticket < self._low:
            raise RuntimeError(f"ticket {group.ticket} came in twice")
        if self._flat_left and not group.has_signal:
            self._flat_left -= 1
            self._drop(group.ticket, "filtered")
        else:
            self.waiting[group.ticket] = group

    def published(self, version: int) -> None:
        """To be called when this version is announced: nothing starts under those before any more."""
        # A run that ended in the middle of a publish period has one version more than it resumes with if it gets more steps.
        del self._bounds[version:]
        while len(self._bounds) < version:
            self._bounds.append(self.args.quota(len(self._bounds)) + self.dropped.total())

    def take(self, step: int) -> list[Group] | None:
        """The groups of step `step` (from 1), or None while there are not enough."""
        args, version = self.args, self.args.version_at(step)
        if args.max_staleness is not None and args.stale == "drop":
            for ticket in [t for t, group in self.waiting.items() if version - group.oldest > args.max_staleness]:
                del self.waiting[ticket]
                self._drop(ticket, "stale")
        tickets = sorted(self.waiting)[: args.prompts_per_step]
        if len(tickets) < args.prompts_per_step or not self._in_time(step, tickets):
            return None
        groups = [self.waiting.pop(ticket) for ticket in tickets]
        for ticket in tickets:
            self._settle(ticket)
        self.trained += len(groups)
        self._flat_left = self._flat_limit
        return groups

    def take_gone(self) -> dict[str, list[int]]:
        """The tickets that were dropped since the last call, by reason."""
        gone, self.gone = self.gone, {}
        return gone

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
        """One line on where every ticket went. unfinished: those that generators gave up at the end. Raises RuntimeError if
        the sum does not come out."""
        in_flight, dropped = len(self.waiting) + len(unfinished), self.dropped.total()
        line = f"{started:,} tickets started = {self.trained:,} trained + {dropped:,} dropped + {in_flight:,} in flight"
        if started != self.trained + dropped + in_flight:
            raise RuntimeError(f"tickets were lost: {line.replace('=', 'is not')}")
        return line

    def _in_time(self, step: int, tickets: list[int]) -> bool:
        """True if, with --stale wait, all that these tickets leave over can still be trained before it is too old: what
        started under version v or before (tickets below a bound) must be trained before version v + max_staleness + 1."""
        args = self.args
        if args.max_staleness is None or args.stale == "drop":
            return True
        version = args.version_at(step)
        for started_under in range(max(0, version - args.max_staleness), version + 1):
            known = started_under < len(self._bounds)
            bound = self._bounds[started_under] if known else args.quota(started_under) + self.dropped.total()
            left = bound - min(bound, self._low) - sum(t < bound for t in self._high) - sum(t < bound for t in tickets)
            steps_left = (started_under + args.max_staleness + 1) * args.trigger_parameter_sync_step - step
            if left > steps_left * args.prompts_per_step:
                return False
        return True

    def state(self) -> dict:
        """For a checkpoint, beside the groups in `waiting`."""
        names = ("trained", "dropped", "_low", "_bounds", "_flat_left")
        return {name: getattr(self, name) for name in names} | {"_high": sorted(self._high)}

    def restore(self, state: dict, groups: list[Group], drawn: int) -> list[int]:
        """Takes `state` and the waiting groups back; returns the tickets that were under way, of `drawn` in all."""
        for name, value in state.items():
            setattr(self, name, value)
        self._high, self.dropped = set(self._high), Counter(self.dropped)
        self.waiting = {group.ticket: group for group in groups}
        return self.open(drawn)

    def open(self, drawn: int) -> list[int]:
        """The tickets, of `drawn` in all, that are neither dealt with nor here."""
        return [t for t in range(self._low, drawn) if t not in self._high and t not in self.waiting]

    def _drop(self, ticket: int, reason: str) -> None:
        self.dropped[reason] += 1
        self.gone.setdefault(reason, []).append(ticket)
        self._settle(ticket)

    def _settle(self, ticket: int) -> None:
        self._high.add(ticket)
        while self._low in self._high:
            self._high.remove(self._low)
            self._low += 1

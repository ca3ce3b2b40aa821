"""The learners' end of a split job: the samples that have arrived, and the samples' state in a checkpoint.

`Batches` hands over whole batches, each sampled by one version of the weights (train_one_step_off.py); `Stream` hands over the
oldest groups that have arrived (train_async.py). Every learner has the same samples.
"""

import json
from collections import Counter

from rl.ranks import dist
from rl.ranks.timers import Timers
from rl.samples.channel import ControlBlock, Inbox
from rl.samples.group import Group, lack_scores
from rl.samples.schedule import NextTicket, Schedule, check_kind
from rl.samples.split_schedule import AsyncSchedule, OneStepOffSchedule
from rl.samples.tickets import drawn, open_tickets, started
from rl.split import Split


class _Samples:
    """The common base: the learners' end of the ring, and the control block."""

    kind: type[Schedule]  # of the script's schedule

    def __init__(self, args, split: Split):
        """args: the script's. Raise UserError if its schedule is of another kind."""
        check_kind(args, self.kind, type(self).__name__)
        self.args = args
        self.split = split
        self.inbox = Inbox(split)
        self.control = ControlBlock(split)

    def published(self, version: int) -> None:
        """Announce to the generators that this version of the weights is ready to be received."""
        self.control.update(version=version)

    def metrics(self, step: int, timer: Timers) -> dict[str, float]:
        """Return the step's metrics since the last call: who waited, from the learner's timer and the generators' reports, and
        the newest publish."""
        out = {"fully_async/trainer/idle_ratio": timer.ledger()["wait"]}
        reports = [*self.inbox.reports]
        self.inbox.reports.clear()
        for report in reports:
            out |= {f"ledger/generator_{report['rank']}/{phase}": share for phase, share in report["ledger"].items()}
        if reports:
            total = sum(report["elapsed"] for report in reports)
            waited = sum(report["ledger"]["wait"] * report["elapsed"] for report in reports)
            out["fully_async/rollouter/idle_ratio"] = waited / total
            out["fully_async/rollouter/held_ratio"] = sum(report["held"] for report in reports) / total
            seconds = max(report["publish_seconds"] for report in reports)
            size = reports[-1]["publish_gb"]
            out |= {"publish/seconds": seconds, "publish/gb": size, "publish/gb_per_s": size / seconds}
        return out

    def close(self) -> list[str]:
        """Wait for the final records of all generators. Return the last lines of the run's output. May be called again."""
        while len(self.inbox.last_words) < self.split.generators:
            self.inbox.receive()
        return []

    def ask(self, step: int) -> None:
        """Announce the checkpoint of that step to the generators, ahead of `snapshot`."""


class Batches(_Samples):
    """Whole batches, in order."""

    kind = OneStepOffSchedule

    def __init__(self, args, split: Split):
        super().__init__(args, split)
        self._next = NextTicket()
        self._gone: list[int] = []  # tickets that the newest batch has left out
        self._left_out: list[Group] = []
        self._start = {"batch": 0, "ticket": 0, "version": 0}  # where the generators start

    def open(self) -> None:
        """Let the generators begin."""
        if self.split.ranks.is_main:
            self.split.store.set("start", json.dumps(self._start | {"validated": self.inbox.validations.newest}))

    def metrics(self, step: int, timer: Timers) -> dict[str, float]:
        bound = 2 * self.args.schedule.prompts_per_step  # the batch in training and the next one
        return super().metrics(step, timer) | {"fully_async/count/max_required_samples": bound}

    def wait(self) -> None:
        """Wait until the next batch is whole."""
        while not self.inbox.batches:
            self.inbox.receive()

    def next(self) -> list[Group]:
        """Return the groups of the next batch, trained and left out; none if it has not arrived."""
        counts = self.inbox.batches[0] if self.inbox.batches else {"groups": 0, "left_out": 0}
        return list(self.inbox.groups)[: counts["groups"] + counts["left_out"]]

    def take(self) -> tuple[list[Group], dict[str, float]]:
        """Return the next batch, which must have arrived: its groups, and its generation metrics."""
        batch = self.inbox.batches.popleft()
        groups = [self.inbox.groups.popleft() for _ in range(batch["groups"])]
        self._left_out = [self.inbox.groups.popleft() for _ in range(batch["left_out"])]
        self._gone = self._next.advance(batch["next_ticket"], groups)
        return groups, batch["metrics"]

    def take_gone(self) -> dict[str, list[int]]:
        """Return the tickets that the newest batch has left out, by reason."""
        return {"filtered": self._gone}

    def take_left_out(self) -> dict[str, list[Group]]:
        """Return the groups that the newest batch has left out, by reason."""
        return {"filtered": self._left_out}

    def snapshot(self, step: int) -> tuple[dict, list[Group], list[Group]]:
        """Return (state, groups, unfinished groups) for the checkpoint of that step. The groups are the next batch, which
        cannot be made again without its weights. A batch that lacks scores is left out, to be sampled again."""
        batches = [batch | {"left_out": 0} for batch in list(self.inbox.batches)[:1]]
        groups = list(self.inbox.groups)[: batches[0]["groups"]] if batches else []
        if lack_scores(self.next()):
            batches = groups = []
        start = {"batch": step + len(batches), "ticket": batches[0]["next_ticket"] if batches else self._next.ticket}
        start |= {"version": step}
        state = {"start": start, "batches": batches, "next_ticket": self._next.state()}
        return state | {"validations": self.inbox.validations.state()}, groups, []

    def restore(self, state: dict, groups: list[Group], unfinished: list[Group]) -> None:
        self.inbox.validations.restore(state["validations"])
        self._start = state["start"]
        self._next.restore(state["next_ticket"])
        self.inbox.groups.extend(groups)
        self.inbox.batches.extend(state["batches"])


class SampleBuffer:
    """The groups that have arrived. A step trains the oldest ones. Every learner has the same buffer."""

    def __init__(self, schedule: AsyncSchedule, filter_groups: bool = False, max_num_gen_batches: int = 10):
        self.schedule = schedule
        self.waiting: dict[int, Group] = {}
        self.trained = 0
        self.dropped: Counter[str] = Counter()  # tickets by reason: "stale", "filtered"
        self.gone: dict[str, list[int]] = {}  # tickets dropped since `Stream.take_gone`, by reason
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


class Stream(_Samples):
    """Groups as they arrive, on their way into the sample buffer, and their tickets."""

    kind = AsyncSchedule

    def __init__(self, args, split: Split):
        super().__init__(args, split)
        self.buffer = SampleBuffer(args.schedule, args.loss.filter_groups, args.loss.max_num_gen_batches)
        self._tickets = {"drawn": 0, "again": [], "unfinished": []}

    def open(self) -> None:
        """Let the generators begin; in a resumed run, with the tickets that were under way when it stopped."""
        if self.split.ranks.is_main:
            open_tickets(self.split.store, **self._tickets)
            self.split.store.set("validated", str(self.inbox.validations.newest))

    def wait(self, step: int) -> None:
        """Wait for the step's groups, or until the run must stop. A collective."""
        while not dist.stopping():
            self._take_in()
            if self.next(step):
                return
            self.inbox.receive()

    def next(self, step: int) -> list[Group]:
        """Return the step's groups, the oldest that have arrived; none while there are not enough."""
        groups = self.buffer.next(step)
        self.control.update(dropped=self.buffer.dropped.total())
        return groups

    def take(self, step: int) -> list[Group]:
        """Return the step's groups, which must have arrived. They are trained now."""
        return self.buffer.take(step)

    def take_gone(self) -> dict[str, list[int]]:
        """Return the tickets that were not trained since the last call, by reason."""
        gone, self.buffer.gone = self.buffer.gone, {}
        return gone

    def take_left_out(self) -> dict[str, list[Group]]:
        """Return the groups that were dropped since the last call, by reason."""
        left_out, self.buffer.left_out = self.buffer.left_out, {}
        return left_out

    def _take_in(self) -> None:
        while self.inbox.groups:
            self.buffer.add(self.inbox.groups.popleft())

    def metrics(self, step: int, timer: Timers) -> dict[str, float]:
        version = {"fully_async/count/current_param_version": self.args.schedule.version_at(step)}
        return super().metrics(step, timer) | self.buffer.metrics(started(self.split.store)) | version

    def ask(self, step: int) -> None:
        self.control.update(snapshot=step)

    def snapshot(self, step: int) -> tuple[dict, list[Group], list[Group]]:
        """Return (state, groups that wait to be trained, groups that are under way) for the checkpoint of that step. Groups
        that lack scores are left out, to be sampled again."""
        unfinished = self.inbox.unfinished_at(step)
        self._take_in()  # --filter-groups drops groups here
        groups = [group for group in self.buffer.waiting.values() if not (group.is_unscored or group.lacks_scores)]
        state = {"buffer": self.buffer.state(), "drawn": drawn(self.split.store)}
        return state | {"validations": self.inbox.validations.state()}, groups, unfinished

    def restore(self, state: dict, groups: list[Group], unfinished: list[Group]) -> None:
        """Restore a `snapshot`. Tickets under way continue; those without a saved group begin again."""
        self.inbox.validations.restore(state["validations"])
        again = self.buffer.restore(state["buffer"], groups, state["drawn"])
        self._tickets = {"drawn": state["drawn"], "again": again, "unfinished": unfinished}

    def close(self) -> list[str]:
        """Stop the generators. Return the last lines of the run's output; the first accounts for every ticket."""
        self.control.update(stop=True)
        super().close()
        self._take_in()
        unfinished = [ticket for last in self.inbox.last_words for ticket in last["unfinished"]]
        return [self.buffer.account(unfinished, started(self.split.store))]

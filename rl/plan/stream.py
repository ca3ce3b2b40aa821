"""train_async.py in simulated time: generators, learners and publishes on a virtual clock.

The schedule is not imitated: tickets, staleness, publishes and drops are rl/samples' own Tickets and SampleBuffer
over a store that is a dict.
"""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

from rl.plan.engine import Engine, Group
from rl.plan.service_times import ServiceTimes
from rl.plan.simulation import Load, Ranks, Scorers, Steps, learning, make_engines
from rl.plan.workload import Workload
from rl.samples.buffer import SampleBuffer
from rl.samples.control import State
from rl.samples.schedule import ScheduleArgs
from rl.samples.tickets import Tickets, open_tickets, started


class DictStore:
    """torch's store within this process, as far as the schedule uses one."""

    def __init__(self):
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> str:
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, 0)) + amount
        self._values[key] = total
        return total


class Generator:
    """train_async.py's `generate`: between two engine steps it takes new weights, then the tickets that may start."""

    def __init__(self, run: "Stream", engine: Engine, scorers: Scorers):
        self.run, self.engine, self.scorers = run, engine, scorers
        self.tickets = Tickets(run.store, run.args, run.total, run.ranks.engines)
        self.under_way = 0  # tickets that are started and not sent
        self.idle, self._idle_since = 0.0, 0.0
        self._started = 0.0  # when the run of engine steps began
        self._steps = 0  # its length; 0 while there is nothing to do
        self._token = 0  # which of the events in the clock is this generator's next

    @property
    def free(self) -> int:
        """As Generator.free_slots of rl/generation/generator.py."""
        return max(0, -(-(self.engine.slots - self.engine.unfinished) // self.run.n))

    def wake(self, now: float) -> None:
        """Something has changed that it may act on: it does so after the engine step under way."""
        if now < self._idle_since:  # it still takes weights
            self.run.at(self._idle_since, lambda later, _: self.wake(later), None)
        elif not self._steps:
            self.idle += now - self._idle_since
            self._act(now)
        elif self.engine.version < self.run.version or self.free:
            steps = self.engine.steps_by(now - self._started, self._steps)
            if steps < self._steps:
                self._go(steps)

    def idle_until(self, now: float) -> float:
        return self.idle if self._steps else self.idle + max(0.0, now - self._idle_since)

    def _go(self, steps: int) -> None:
        self._steps, self._token = steps, self._token + 1
        self.run.at(self._started + self.engine.seconds(steps), self._stepped, self._token)

    def _stepped(self, now: float, token: int) -> None:
        if token != self._token:  # another event has taken its place
            return
        done = self.engine.end(self._steps)
        now += len(done) * self.engine.times.finish
        for group in done:
            group.scored_at, group.left = self.scorers.score(now), group.left - 1
            if not group.left and group.scored_at == now:
                self.under_way -= 1
                self.run.at(now, self.run.arrive, group)
            elif not group.left:
                self.run.at(group.scored_at, self._scored, group)
        self._act(now)

    def _scored(self, now: float, group: Group) -> None:
        """The last score of a group has come, after its last token."""
        self.under_way -= 1
        self.run.arrive(now, group)
        self.wake(now)

    def _act(self, now: float) -> None:
        run, engine = self.run, self.engine
        in_the_way = run.args.partial_rollout == "off" and engine.unfinished
        version = engine.version if in_the_way else run.version
        free = self.free
        for ticket in self.tickets.take(free, self.under_way, version, run.state) if free else ():
            self.under_way += 1
            engine.add(Group(ticket, *run.workload.group(ticket)))
        if version > engine.version:
            now += engine.take_weights(version, run.args.partial_rollout == "recompute")
            run.at(now, run.received, None)
        self._started, self._steps = now, 0
        if engine.unfinished:
            self._go(engine.begin())
        else:
            self._token, self._idle_since = self._token + 1, now


class Stream:
    """train_async.py: engines stream groups to the learners, whose weights they take between two of their steps."""

    def __init__(self, times: ServiceTimes, load: Load, ranks: Ranks, workload: Workload, args: ScheduleArgs, steps: int):
        self.times, self.load, self.ranks, self.workload, self.args, self.steps = times, load, ranks, workload, args, steps
        self.n, self.total = len(workload.group(0)[1]), steps * args.prompts_per_step
        self.store, self.version, self.state = DictStore(), 0, State(version=0, dropped=0)
        open_tickets(self.store)
        self.buffer = SampleBuffer(args, load.filter_groups, load.max_num_gen_batches)
        self.generators = [Generator(self, *pair) for pair in zip(*make_engines(times, load, ranks.engines), strict=True)]
        self.out, self._clock, self._number = Steps(ranks), [], count()
        self._arrived: deque[Group] = deque()
        self._behind = 0  # generators that have not received the newest version
        self._step, self._waits_since, self._waits_to_publish = 1, 0.0, False
        self._learned, self._waited, self._groups = 0.0, 0.0, []

    def at(self, when: float, what: Callable, about) -> None:
        """Calls what(when, about) at that time."""
        heapq.heappush(self._clock, (when, next(self._number), what, about))

    def run(self) -> Steps:
        """The whole run. Raises RuntimeError if it stands still."""
        for generator in self.generators:
            generator.wake(0.0)
        while self._step <= self.steps:
            if not self._clock:
                raise RuntimeError(f"the schedule stands still before step {self._step} of {self.steps}")
            now, _, what, about = heapq.heappop(self._clock)
            what(now, about)
        self.out.dropped = self.buffer.dropped
        return self.out

    def arrive(self, now: float, group: Group) -> None:
        """A group has come in."""
        self._arrived.append(group)
        if not self._groups:
            self._take(now)

    def received(self, now: float, _) -> None:
        """A generator has the newest weights."""
        self._behind -= 1
        if not self._behind and self._waits_to_publish:
            self._publish(now)

    def _take(self, now: float) -> None:
        """The learners' look at what has come in, as rl/samples/stream.py's `take`."""
        while self._arrived:
            self.buffer.add(self._arrived.popleft())
        may_drop = self.args.max_staleness is not None
        groups = self.buffer.take(self._step) if may_drop or len(self.buffer.waiting) >= self.load.prompts else None
        if self.buffer.dropped.total() != self.state.dropped:
            self._tell(now)
        if groups:
            self._groups, self._waited = groups, now - self._waits_since
            self._learned = learning(self.times, self.load, self.ranks, groups)
            self.at(now + self._learned, self._trained, None)

    def _trained(self, now: float, _) -> None:
        if not self.args.publishes_after(self._step, self.steps):
            self._finish(now, None)
        elif self._behind:  # the weights before these are still on their way
            self._waits_to_publish = True
        else:
            self._publish(now)

    def _publish(self, now: float) -> None:
        self._waits_to_publish = False
        self.at(now + self.times.learner.publish, self._published, None)

    def _published(self, now: float, _) -> None:
        self.version, self._behind = self.version + 1, len(self.generators)
        self.buffer.published(self.version)
        self._tell(now)
        self._finish(now, None)

    def _tell(self, now: float) -> None:
        """The control block changes: each generator acts on it after the engine step under way."""
        self.state = State(version=self.version, dropped=self.buffer.dropped.total())
        for generator in self.generators:
            generator.wake(now)

    def _finish(self, now: float, _) -> None:
        idle = sum(generator.idle_until(now) for generator in self.generators)
        version = self.args.version_at(self._step)
        self.out.add(now, self._groups, version, self._learned, self._waited, idle)
        if self._step == self.steps:
            self._close()
        self._step, self._groups, self._waits_since = self._step + 1, [], now
        if self._step <= self.steps:
            self._take(now)

    def _close(self) -> None:
        """Counts where every ticket went. Raises RuntimeError if one was lost."""
        for group in self._arrived:
            self.buffer.add(group)
        to_come = {about.ticket for _, _, _, about in self._clock if isinstance(about, Group)}
        unfinished = to_come.union(*(generator.engine.tickets for generator in self.generators))
        self.out.account = self.buffer.account(sorted(unfinished), started(self.store))


def asynchronous(times: ServiceTimes, load: Load, ranks: Ranks, workload: Workload, args: ScheduleArgs, steps: int) -> Steps:
    """train_async.py."""
    return Stream(times, load, ranks, workload, args, steps).run()

"""A run in simulated time: generators, learners and publishes on a virtual clock, driven by service times.

The schedule is not imitated: tickets, staleness, publishes and drops are rl/schedule.py's own Tickets and SampleBuffer over a
store that is a dict. Left out: validation, checkpoints, start-up, crashes, and the network between nodes.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from rl.channel import State
from rl.plan.engine import Engine, Group
from rl.plan.service_times import ServiceTimes
from rl.plan.workload import Workload
from rl.schedule import SampleBuffer, ScheduleArgs, Tickets, open_tickets, started

STEADY = 3  # the first of so many parts of a run is not counted: the pipeline fills


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job, or of each role of it."""

    engines: int
    learners: int
    per_engine: int = 1  # ranks that share an engine (--rollout-tp)
    colocated: bool = False  # the same ranks generate and learn, in turn (train_sync.py)

    @property
    def total(self) -> int:
        return self.learners if self.colocated else self.engines * self.per_engine + self.learners


@dataclass(frozen=True)
class Load:
    """What flags say of the work of a step, besides the schedule."""

    prompts: int  # of a step
    updates: int  # optimizer steps of a step
    slots: int  # --max-num-seqs
    prefill_tokens: int = 8192  # --max-num-batched-tokens
    filter_groups: bool = False
    max_num_gen_batches: int = 10


@dataclass
class Steps:
    """What the simulated run did, step by step. Seconds."""

    ranks: Ranks
    ends: list[float] = field(default_factory=list)  # of the step
    generated: list[float] = field(default_factory=list)  # colocated: seconds of generation
    waited: list[float] = field(default_factory=list)  # the learners' wait for groups
    learned: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # prompt and response tokens of all responses, as perf/total_num_tokens
    mean_age: list[float] = field(default_factory=list)  # of the tokens, in versions
    max_age: list[int] = field(default_factory=list)
    partial: list[float] = field(default_factory=list)  # share of responses with tokens of several versions
    idle: list[float] = field(default_factory=list)  # seconds in which an engine had nothing to do, up to the step's end
    dropped: Counter = field(default_factory=Counter)  # tickets of the whole run, by reason
    account: str = ""  # where every ticket went

    def add(
        self, end: float, groups: list[Group], version: int, learned: float, waited: float = 0.0, idle: float = 0.0
    ) -> None:
        tokens = sum(sum(group.lengths) for group in groups)
        responses = sum(len(group.lengths) for group in groups)
        self.ends.append(end)
        self.learned.append(learned)
        self.waited.append(waited)
        self.idle.append(idle)
        self.tokens.append(tokens + sum(len(group.lengths) * group.prompt for group in groups))
        self.mean_age.append(version - sum(group.versions for group in groups) / tokens)
        self.max_age.append(version - min(group.oldest for group in groups))
        self.partial.append(sum(group.partial for group in groups) / responses)

    @property
    def first(self) -> int:
        """Steps that are not counted."""
        return len(self.ends) // STEADY

    @property
    def seconds(self) -> float:
        """Of the counted steps."""
        return self.ends[-1] - (self.ends[self.first - 1] if self.first else 0.0)

    @property
    def step_seconds(self) -> float:
        """Seconds of a mean step."""
        return self.seconds / (len(self.ends) - self.first)

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens[self.first :]) / self.seconds

    @property
    def learner_idle(self) -> float:
        """The share of the time in which the learners wait for groups."""
        return sum(self.waited[self.first :]) / self.seconds

    @property
    def generator_idle(self) -> float:
        """The share of the engines' time in which they have nothing to do. Colocated, the time of learning is none."""
        before = self.idle[self.first - 1] if self.first else 0.0
        return (self.idle[-1] - before) / self.seconds / self.ranks.engines

    def mean(self, values: list[float]) -> float:
        """Of the counted steps."""
        kept = values[self.first :]
        return sum(kept) / len(kept)


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


class Scorers:
    """An engine's scoring processes: first come, first served."""

    def __init__(self, seconds: float, workers: int):
        self.seconds, self.free = seconds, [0.0] * workers

    def score(self, now: float) -> float:
        """The time at which a response is scored that ended now."""
        if not self.seconds:
            return now
        done = max(now, self.free[0]) + self.seconds
        heapq.heapreplace(self.free, done)
        return done


# ------------------------------------------------------------------------------------------- batches made as a whole


def generate(engine: Engine, scorers: Scorers, groups: list[Group], start: float) -> tuple[float, float]:
    """An engine with nothing else under way makes these groups; returns when the last is scored, and the last engine step's
    end."""
    now = scored = start
    for group in groups:
        engine.add(group)
    while engine.unfinished:
        steps = engine.begin()
        now += engine.seconds(steps)
        done = engine.end(steps)
        now += len(done) * engine.times.finish
        scored = max([scored, *(scorers.score(now) for _ in done)])
    return max(now, scored), now


def make_batch(engines: list[Engine], pools: list[Scorers], load: Load, workload: Workload, ticket: int, start: float):
    """The scripts' make_batch: every engine serves its share; groups without signal are replaced. Returns the groups, the next
    ticket, the time it is over, the engines' seconds of having nothing to do, and the dropped groups."""
    kept, dropped, rounds, now, idle = [], [], 0, start, 0.0
    while len(kept) < load.prompts and rounds < load.max_num_gen_batches:
        rounds += 1
        tickets = range(ticket, ticket + load.prompts - len(kept))
        ticket, ends = tickets.stop, []
        groups = [Group(t, *workload.group(t)) for t in tickets]
        for i, (engine, pool) in enumerate(zip(engines, pools, strict=True)):
            ends.append(generate(engine, pool, groups[i :: len(engines)], now))
        idle += sum(max(end for end, _ in ends) - worked for _, worked in ends)
        now = max(end for end, _ in ends)
        for group in groups:
            (dropped if load.filter_groups and not group.has_signal else kept).append(group)
    missing = load.prompts - len(kept)
    return kept + dropped[:missing], ticket, now, idle, len(dropped) - missing


def _engines(times: ServiceTimes, load: Load, number: int) -> tuple[list[Engine], list[Scorers]]:
    engines = [Engine(times.engine, load.slots, load.prefill_tokens) for _ in range(number)]
    return engines, [Scorers(times.engine.score, times.engine.score_workers) for _ in engines]


def _learning(times: ServiceTimes, load: Load, ranks: Ranks, groups: list[Group]) -> float:
    tokens, squares = sum(group.tokens for group in groups), sum(group.squares for group in groups)
    return times.learner.learn(tokens, squares, load.updates, ranks.learners)


def sync(times: ServiceTimes, load: Load, ranks: Ranks, workload: Workload, steps: int) -> Steps:
    """train_sync.py: all generate, all learn, the engines take the weights."""
    out, now, ticket, idle = Steps(ranks), 0.0, 0, 0.0
    engines, pools = _engines(times, load, ranks.engines)
    for step in range(1, steps + 1):
        groups, ticket, end, more, dropped = make_batch(engines, pools, load, workload, ticket, now)
        out.generated.append(end - now)
        learned, idle = _learning(times, load, ranks, groups), idle + more
        now = end + times.gather + learned + max(engine.take_weights(step) for engine in engines)
        out.dropped["filtered"] += dropped
        out.add(now, groups, step - 1, learned, idle=idle)
    return out


def one_step_off(times: ServiceTimes, load: Load, ranks: Ranks, workload: Workload, steps: int) -> Steps:
    """train_one_step_off.py: batch k (from 0) with the weights of version k - 1, while the learners train batch k - 1."""
    out, ticket, idle = Steps(ranks), 0, 0.0
    engines, pools = _engines(times, load, ranks.engines)
    published, made, learned_until = [0.0], 0.0, 0.0  # when: each version; the last batch; the learners' last step
    for k in range(steps):
        start, version = made, max(0, k - 1)
        if version > engines[0].version:
            start = max(made, published[version])
            idle += (start - made) * len(engines)
            start += max(engine.take_weights(version) for engine in engines)
        groups, ticket, made, more, dropped = make_batch(engines, pools, load, workload, ticket, start)
        made += times.gather
        idle, waited = idle + more, max(0.0, made - learned_until)
        learned = _learning(times, load, ranks, groups)
        learned_until = max(learned_until, made) + learned + times.learner.publish
        published.append(learned_until)
        out.dropped["filtered"] += dropped
        out.add(learned_until, groups, k, learned, waited, idle)
    return out


# --------------------------------------------------------------------------------------------------------- the stream


class Generator:
    """train_async.py's `generate`: between two engine steps it takes new weights, then the tickets that may start."""

    def __init__(self, run: "Stream", engine: Engine, scorers: Scorers):
        self.run, self.engine, self.scorers = run, engine, scorers
        self.tickets = Tickets(run.store, run.args, run.total)
        self.idle, self._idle_since = 0.0, 0.0
        self._started = 0.0  # when the run of engine steps began
        self._steps = 0  # its length; 0 while there is nothing to do
        self._token = 0  # which of the events in the clock is this generator's next

    @property
    def free(self) -> int:
        """As Generator.free_slots of rl/generator.py."""
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
            if not group.left:
                self.run.at(group.scored_at, self.run.arrive, group)
        self._act(now)

    def _act(self, now: float) -> None:
        run, engine = self.run, self.engine
        in_the_way = run.args.partial_rollout == "off" and engine.unfinished
        version = engine.version + 1 if run.version > engine.version and not in_the_way else engine.version
        free = self.free
        for ticket in self.tickets.take(free, version, run.state) if free else ():
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
        self.generators = [Generator(self, *pair) for pair in zip(*_engines(times, load, ranks.engines), strict=True)]
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
        """The learners' look at what has come in, as rl/stream.py's `take`."""
        while self._arrived:
            self.buffer.add(self._arrived.popleft())
        may_drop = self.args.max_staleness is not None
        groups = self.buffer.take(self._step) if may_drop or len(self.buffer.waiting) >= self.load.prompts else None
        if self.buffer.dropped.total() != self.state.dropped:
            self._tell(now)
        if groups:
            self._groups, self._waited = groups, now - self._waits_since
            self._learned = _learning(self.times, self.load, self.ranks, groups)
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
        to_come = {about.ticket for _, _, what, about in self._clock if what == self.arrive}
        unfinished = to_come.union(*(generator.engine.tickets for generator in self.generators))
        self.out.account = self.buffer.account(sorted(unfinished), started(self.store))


def asynchronous(times: ServiceTimes, load: Load, ranks: Ranks, workload: Workload, args: ScheduleArgs, steps: int) -> Steps:
    """train_async.py."""
    return Stream(times, load, ranks, workload, args, steps).run()

"""A run in simulated time, driven by service times: what its steps took, and the two modes that make whole batches.

The stream of train_async.py is rl/plan/stream.py. Left out: validation, checkpoints, start-up and crashes.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, field

from rl.plan.engine import Engine, Group
from rl.plan.service_times import ServiceTimes
from rl.plan.workload import Workload

STEADY = 3  # the first of this many parts of a run is not counted: the pipeline fills


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
    surplus: int = 0  # prompts under way that a step of train_sync.py does not wait for (--over-sample)


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


def generate(engine: Engine, scorers: Scorers, groups: list[Group], start: float) -> tuple[list[Group], float, float]:
    """An engine makes as many groups as these: those that end first of them and of what was under way before, which continues.
    Returns them, when the last score is there, and the last engine step's end."""
    now = scored = start + engine.prefill_again()
    for group in groups:
        engine.add(group)
    while len(engine.ended) < len(groups):
        steps = engine.begin()
        now += engine.seconds(steps)
        done = engine.end(steps)
        now += len(done) * engine.times.finish
        for group in done:
            scored, group.left = max(scored, scorers.score(now)), group.left - 1
            if not group.left:
                engine.ended.append(group)
    made, engine.ended = engine.ended[: len(groups)], engine.ended[len(groups) :]
    return made, max(now, scored), now


def make_batch(engines: list[Engine], pools: list[Scorers], load: Load, workload: Workload, ticket: int, start: float):
    """The scripts' make_batch: every engine serves its share; groups without signal are replaced. Returns the groups, the next
    ticket, the time it is over, the engines' seconds of having nothing to do, and the dropped groups."""
    kept, dropped, rounds, now, idle = [], [], 0, start, 0.0
    while len(kept) < load.prompts and rounds < load.max_num_gen_batches:
        rounds += 1
        tickets = range(ticket, ticket + load.prompts - len(kept))
        ticket, ends = tickets.stop, []
        groups, made = [Group(t, *workload.group(t)) for t in tickets], []
        for i, (engine, pool) in enumerate(zip(engines, pools, strict=True)):
            of_engine, *end = generate(engine, pool, groups[i :: len(engines)], now)
            made += of_engine
            ends.append(end)
        idle += sum(max(end for end, _ in ends) - worked for _, worked in ends)
        now = max(end for end, _ in ends)
        for group in sorted(made, key=lambda group: group.ticket):
            (dropped if load.filter_groups and not group.has_signal else kept).append(group)
    missing = load.prompts - len(kept)
    return kept + dropped[:missing], ticket, now, idle, len(dropped) - missing


def make_engines(times: ServiceTimes, load: Load, number: int) -> tuple[list[Engine], list[Scorers]]:
    engines = [Engine(times.engine, load.slots, load.prefill_tokens) for _ in range(number)]
    return engines, [Scorers(times.engine.score, times.engine.score_workers) for _ in engines]


def learning(times: ServiceTimes, load: Load, ranks: Ranks, groups: list[Group]) -> float:
    tokens, squares = sum(group.tokens for group in groups), sum(group.squares for group in groups)
    return times.learner.learn(tokens, squares, load.updates, ranks.learners)


def sync(times: ServiceTimes, load: Load, ranks: Ranks, workload: Workload, steps: int) -> Steps:
    """train_sync.py: all generate, all learn, the engines take the weights."""
    out, now, ticket, idle = Steps(ranks), 0.0, load.surplus, 0.0
    engines, pools = make_engines(times, load, ranks.engines)
    for first in range(load.surplus):
        engines[first % len(engines)].add(Group(first, *workload.group(first)))
    for step in range(1, steps + 1):
        groups, ticket, end, more, dropped = make_batch(engines, pools, load, workload, ticket, now)
        out.generated.append(end - now)
        learned, idle = learning(times, load, ranks, groups), idle + more
        now = end + times.gather + learned + max(engine.take_weights(step) for engine in engines)
        out.dropped["filtered"] += dropped
        out.add(now, groups, step - 1, learned, idle=idle)
    return out


def one_step_off(times: ServiceTimes, load: Load, ranks: Ranks, workload: Workload, steps: int) -> Steps:
    """train_one_step_off.py: batch k (from 0) with the weights of version k - 1, while the learners train batch k - 1."""
    out, ticket, idle = Steps(ranks), 0, 0.0
    engines, pools = make_engines(times, load, ranks.engines)
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
        learned = learning(times, load, ranks, groups)
        learned_until = max(learned_until, made) + learned + times.learner.publish
        published.append(learned_until)
        out.dropped["filtered"] += dropped
        out.add(learned_until, groups, k, learned, waited, idle)
    return out

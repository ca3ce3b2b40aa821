"""Simulates a run: how long a step takes in each mode, and which side waits.

All modes follow rl/samples/split_schedule.py with a staleness threshold of their own: 0 for train_sync.py, 1 for
train_one_step_off.py, where a batch starts when the previous one is complete. Left out: uneven engines, slow rewards, dropped
groups, validation, checkpoints, start-up and crashes.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from rl.samples.split_schedule import AsyncSchedule
from tools.plan.devices import Roles
from tools.plan.workload import Drawn

STEPS = 12  # simulated at least; the first third, in which the pipeline fills, does not count


@dataclass(frozen=True)
class Times:
    """Seconds that the parts of a run take."""

    source: str  # their source, in words
    step: float = 0.0  # of a decode step, for any number of responses
    row: float = 0.0  # more for each response
    weights: float = 0.0  # of reading all weights; the least that a decode step takes
    row_weights: float = 0.0  # of reading the weights that one token needs: a few experts in a mixture, else all
    context: float = 0.0  # of a decode step, for each token of context
    prefill: float = 0.0  # of a token of a prompt, which all responses of its group share
    receive: float = 0.0  # in which an engine takes new weights
    learn: float = 0.0  # of a training step, for any number of tokens
    token: float = 0.0  # rank-seconds of training; a prompt's tokens count once for its group
    square: float = 0.0  # rank-seconds for each token and token before it: attention
    publish: float = 0.0  # in which a publish keeps the learners from training

    def decoding(self, running: float, context: float) -> float:
        """Seconds of a decode step of this many responses with this many tokens of context each."""
        reading = min(self.weights, running * self.row_weights)
        return self.step + max(reading, running * self.row) + running * context * self.context

    def learning(self, tokens: float, squares: float, learners: int) -> float:
        """Seconds of a training step. squares: the sum of the squared lengths."""
        return self.learn + (tokens * self.token + squares * self.square) / learners


@dataclass(frozen=True)
class Result:
    """A mean step."""

    seconds: float
    tokens: float  # prompts and responses, as perf/total_num_tokens counts
    learners_wait: float  # share of the time
    generators_wait: float


class Engines:
    """All engines of a job as one average engine."""

    def __init__(self, times: Times, roles: Roles, slots: int, work: Drawn, groups: list[list[int]]):
        """slots: responses that each engine decodes at once; groups: the lengths of each ticket's responses."""
        self.times = times
        self.number = roles.engines
        self.slots = slots * roles.engines
        self.prompt = work.prompt
        self.groups = groups
        lengths = np.concatenate(groups)
        self.context = work.prompt + (lengths**2).sum() / lengths.sum() / 2  # tokens of a response that runs
        self.left = [len(group) for group in groups]  # responses of each ticket that have not ended
        self.waiting: deque[tuple[int, int]] = deque()  # (ticket, tokens) of each response
        self.running: list[tuple[float, int]] = []  # heap: (the decode step that ends it, ticket)
        self.decoded = 0.0  # decode steps so far
        self.owed = 0.0  # seconds of other work to do before more decoding
        self.started = self.done = 0  # tickets
        self.now = self.idle = 0.0  # idle: seconds of engines without work, over their number

    def start(self, allowed: int) -> None:
        """Take the tickets up to this number, and start responses while there are free slots."""
        new = range(self.started, max(self.started, allowed))
        self.started = new.stop
        for ticket in new:
            self.waiting.extend((ticket, length) for length in self.groups[ticket])
        while self.waiting and len(self.running) < self.slots:
            ticket, tokens = self.waiting.popleft()
            heapq.heappush(self.running, (self.decoded + tokens, ticket))
        self.owed += len(new) * self.prompt * self.times.prefill / self.number
        if self.running and self.owed:
            self.decoded -= self.owed / self._step()
            self.owed = 0.0

    def decode(self, until: float) -> None:
        """Decode until the first response ends, at most to this time."""
        step = self._step()
        end, ticket = self.running[0] if self.running else (math.inf, 0)
        needed = (end - self.decoded) * step
        seconds = min(needed, until - self.now)
        self.idle += seconds * max(0.0, 1 - len(self.running) / self.number)
        self.now += seconds
        self.decoded += seconds / step
        if needed == seconds:
            heapq.heappop(self.running)
            self.left[ticket] -= 1
            self.done += not self.left[ticket]

    def _step(self) -> float:
        return self.times.decoding(max(1.0, len(self.running) / self.number), self.context)


def simulate(
    times: Times, schedule: AsyncSchedule, roles: Roles, slots: int, work: Drawn, whole_batches: bool = False
) -> Result:
    """Return a mean step of a run. whole_batches: a batch starts when the one before is complete."""
    prompts = schedule.prompts_per_step
    period = schedule.publish_every
    steps = max(STEPS, 3 * period)
    groups = [work.group(ticket) for ticket in range(schedule.quota(steps // period))]
    lengths = np.concatenate(groups)
    part = prompts / len(groups)
    squares = part * ((lengths + work.prompt) ** 2).sum()
    learning = times.learning(part * lengths.sum() + prompts * work.prompt, squares, roles.learners)
    engines = Engines(times, roles, slots, work, groups)
    version = 0
    free = waited = 0.0  # when the learners finish the batch they have; how long they have waited for groups
    ends = [(0.0, 0.0, 0.0)]
    publishes = False  # after the step that is trained
    while len(ends) <= steps:
        allowed = schedule.quota(version)
        if whole_batches:
            allowed = min(allowed, (engines.done // prompts + 1) * prompts)
        engines.start(allowed)
        if roles.colocated and free > engines.now:
            engines.now = free
        else:
            engines.decode(free if free > engines.now else math.inf)
        while free <= engines.now and len(ends) <= steps:
            if publishes:
                version += 1
                engines.owed += times.receive
            publishes = False
            if engines.done < len(ends) * prompts:
                break
            waited += engines.now - free
            publishes = len(ends) % period == 0
            free = engines.now + learning + publishes * times.publish
            ends.append((free, waited, engines.idle))
    first, last = ends[steps // 3], ends[-1]
    seconds, waited, idle = (after - before for before, after in zip(first, last, strict=True))
    tokens = part * (lengths + work.prompt).sum()
    return Result(seconds / (steps - steps // 3), float(tokens), waited / seconds, idle / seconds)

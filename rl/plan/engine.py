"""An engine in simulated time: responses in slots, one token each a decode step, and how long the steps take.

It keeps no clock. Steps between two events are alike but for their context, which grows by one token a response, so that a
run of steps costs one line of arithmetic, however long it is.
"""

import heapq
import math
from collections import deque

from rl.plan.service_times import EngineTimes


class Group:
    """A ticket's responses: what the schedule asks of a group (rl/samples/group.py), and what the simulation counts."""

    __slots__ = ("has_signal", "left", "lengths", "oldest", "partial", "prompt", "scored_at", "ticket", "versions")

    def __init__(self, ticket: int, prompt: int, lengths: list[int], has_signal: bool):
        self.ticket, self.prompt, self.lengths, self.has_signal = ticket, prompt, lengths, has_signal
        self.left = len(lengths)  # responses without a score on its way
        self.scored_at = 0.0  # when the last of these scores comes
        self.oldest = -1  # version of its oldest token; -1 before there is one
        self.versions = 0  # the sum of its tokens' versions
        self.partial = 0  # responses whose tokens are of several versions

    @property
    def tokens(self) -> int:
        """Distinct tokens: the responses', and the prompt's once."""
        return self.prompt + sum(self.lengths)

    @property
    def squares(self) -> int:
        """The sum of the squared lengths: what attention computes."""
        return sum((self.prompt + length) ** 2 for length in self.lengths)


class Engine:
    """Continuous batching. `begin` starts what fits, `end` finishes a run of steps; `seconds` says how long that takes."""

    def __init__(self, times: EngineTimes, slots: int, prefill_tokens: int):
        """slots: --max-num-seqs; prefill_tokens: --max-num-batched-tokens."""
        self.times, self.slots, self.prefill_tokens = times, slots, prefill_tokens
        self.version = 0
        self.waiting: deque[tuple[Group, int]] = deque()  # with the response's length
        self.running = 0
        self._rows = times.rows(slots)
        self.ended: list[Group] = []  # groups that are whole and were not taken, where more are under way than a step trains
        self.steps = 0  # decode steps so far
        self._ends: list = []  # heap: (step after which the response ends, ..., group, version and _versions at its start)
        self._offsets = 0  # sum over the running of prompt tokens less the step at which they started
        self._longest: list[tuple[int, int]] = []  # heap: (the same, negative, and the step after which the response ends)
        self._versions = 0  # the sum of the versions of all steps so far
        self._started = 0
        self._overhead = 0.0  # seconds of the next step's prefill
        self.context = 0  # tokens of context that the next step reads
        self.prefilled = (0, 0, 0)  # of the next step: whether there is a prefill, its prompt tokens, responses that start

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + self.running

    def add(self, group: Group) -> None:
        self.waiting.extend([(group, length) for length in group.lengths])

    def begin(self) -> int:
        """Starts what fits; returns the number of steps up to the next event: a response ends, or more can start."""
        tokens, before, rows = 0, None, self.running
        while self.waiting and self.running < self.slots:
            group, length = self.waiting[0]
            if group is not before:
                if before and tokens + group.prompt > self.prefill_tokens:
                    break
                tokens, before = tokens + group.prompt, group
            self.waiting.popleft()
            self._start(group, length)
        self.prefilled = (int(before is not None), tokens, self.running - rows)
        calls, tokens, rows = self.prefilled
        self._overhead = calls * self.times.prefill + tokens * self.times.prefill_token + rows * self.times.prefill_row
        self.context = self._tokens()
        return 1 if self.waiting and self.running < self.slots else self._ends[0][0] - self.steps

    def seconds(self, steps: int) -> float:
        """The time that this many steps from now take."""
        context = steps * self.context + self.running * (steps * (steps - 1) // 2)
        return self._overhead + steps * self._rows[self.running] + context * self.times.context_token

    def steps_by(self, seconds: float, most: int) -> int:
        """The number of steps, from 1 to `most`, after which so much time has passed: the one under way then is finished."""
        base = self._rows[self.running] + self.context * self.times.context_token
        growth = self.running * self.times.context_token
        left = seconds - self._overhead
        if left <= 0:
            return 1
        if growth > 1e-12 * base:  # left = base * n + growth * n * (n - 1) / 2
            b = base - growth / 2
            steps = (math.sqrt(b * b + 2 * growth * left) - b) / growth
        else:
            steps = left / base if base else most
        return min(max(math.ceil(steps - 1e-9), 1), most)

    def end(self, steps: int) -> list[Group]:
        """The run of steps is over; returns the group of each response that ended with it."""
        self.steps += steps
        self._versions += steps * self.version
        self._overhead, ends, out = 0.0, self._ends, []
        while ends and ends[0][0] <= self.steps:
            _, _, group, length, offset, version, versions = heapq.heappop(ends)
            self.running -= 1
            self._offsets -= offset
            # the first token is the prefill's; of the others each step made one
            group.versions += version + (self._versions - versions if length > 1 else 0)
            group.partial += self.version != version and length > 1
            out.append(group)
        return out

    def take_weights(self, version: int, recompute: bool = False) -> float:
        """New weights between two steps; returns the seconds that takes. recompute: the contexts are prefilled again."""
        self.version = version
        return self.times.receive + (self.prefill_again() if recompute else 0.0)

    def prefill_again(self) -> float:
        """The seconds in which the running responses' contexts are computed again."""
        return self.times.prefill + self._context_sum() * self.times.prefill_token if self.running else 0.0

    def _start(self, group: Group, length: int) -> None:
        end, offset = self.steps + max(1, length - 1), group.prompt - self.steps
        if group.oldest < 0:
            group.oldest = self.version
        self._started += 1  # keeps the heap from comparing groups
        heapq.heappush(self._ends, (end, self._started, group, length, offset, self.version, self._versions))
        self.running += 1
        self._offsets += offset
        if self.times.padded:
            heapq.heappush(self._longest, (-offset, end))

    @property
    def tickets(self) -> set[int]:
        """Of what is under way."""
        return {group.ticket for group, _ in self.waiting} | {entry[2].ticket for entry in self._ends}

    def _context_sum(self) -> int:
        return self._offsets + self.running * self.steps

    def _tokens(self) -> int:
        """Tokens of context that the next step reads."""
        if not self.times.padded:
            return self._context_sum() + self.running
        while self._longest and self._longest[0][1] <= self.steps:
            heapq.heappop(self._longest)
        return self.running * (self.steps - self._longest[0][0] + 1) if self._longest else 0

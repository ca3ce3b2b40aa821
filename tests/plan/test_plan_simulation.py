"""The plan's simulated time: schedules worked out by hand, a plainly written engine, and laws that every run obeys."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.samples.split_schedule import AsyncSchedule
from tools.plan.devices import Roles
from tools.plan.simulation import Result, Times, simulate
from tools.plan.workload import Drawn

SPLIT = Roles(engines=1, learners=1)
IN_TURN = Roles(engines=1, learners=1, colocated=True)


@dataclass
class Fixed:
    """Groups with these lengths in turn."""

    lengths: list[list[int]]
    prompt: int = 0

    def group(self, ticket: int) -> list[int]:
        return self.lengths[ticket % len(self.lengths)]


def schedule(threshold: float, prompts: int = 1, period: int = 1) -> AsyncSchedule:
    return AsyncSchedule(ppo_mini_batch_size=prompts, staleness_threshold=threshold, publish_every=period)


def run(times: Times, roles: Roles, threshold: float, work, prompts: int = 1, slots: int = 8, **how) -> Result:
    return simulate(times, schedule(threshold, prompts, how.pop("period", 1)), roles, slots, work, **how)


def times(**seconds) -> Times:
    """A decode step takes one second. Everything not given takes no time."""
    return Times("by hand", **{"step": 1.0} | seconds)


def test_sync_by_hand():
    """A step takes the time of its longest response, then training. An engine takes the weights before it decodes."""
    work = Fixed([[5, 2], [7, 1]], prompt=3)
    found = run(times(learn=3), IN_TURN, 0, work, prompts=2)
    assert (found.seconds, found.tokens) == pytest.approx((7 + 3, 5 + 2 + 7 + 1 + 4 * 3))
    more = times(learn=3, receive=0.5, prefill=0.25, token=0.1, square=0.01)
    training = 3 + 0.1 * (15 + 2 * 3) + 0.01 * (8**2 + 5**2 + 10**2 + 4**2)
    assert run(more, IN_TURN, 0, work, prompts=2).seconds == pytest.approx(7 + 0.5 + 0.25 * 2 * 3 + training)


def test_one_step_off_by_hand():
    """A batch takes 5 s, training and publish 4 s or 10 s: the slower side decides, the other waits."""
    fast = run(times(learn=3, publish=1), SPLIT, 1, Fixed([[5]]), whole_batches=True)
    assert (fast.seconds, fast.learners_wait, fast.generators_wait) == pytest.approx((5, 1 / 5, 0))
    slow = run(times(learn=9, publish=1), SPLIT, 1, Fixed([[5]]), whole_batches=True)
    assert (slow.seconds, slow.learners_wait, slow.generators_wait) == pytest.approx((10, 0, 5 / 10))


def test_async_by_hand():
    """Responses of 4 and 8 tokens in turn, a prompt a step, training of 1 s. Whole batches take 4 s and 8 s. At threshold 1 two
    tickets are under way, and every 14 s four are trained: at 10 s ticket 3 runs until 17 s and ticket 4 until 14 s, steps end
    at 15 s, 18 s, 23 s and 24 s, and then ticket 7 runs until 31 s and ticket 8 until 28 s."""
    work = Fixed([[4], [8]])
    whole = run(times(learn=1), SPLIT, 1, work, whole_batches=True)
    assert whole.seconds == pytest.approx(6)
    assert run(times(learn=1), SPLIT, 0, work).seconds == pytest.approx(6 + 1)
    assert run(times(learn=1), SPLIT, 1, work).seconds == pytest.approx(14 / 4)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 9), n=st.integers(1, 4), prompts=st.integers(1, 5))
def test_a_batch_takes_the_time_of_an_engine_that_counts_every_token(seed, slots, n, prompts):
    random = np.random.default_rng(seed)
    work = Fixed([random.integers(1, 15, n).tolist() for _ in range(prompts)])
    found = run(times(row=0.25, learn=2), IN_TURN, 0, work, prompts, slots)
    waiting, rows, expected = deque(length for group in work.lengths for length in group), [], 2.0
    while waiting or rows:
        while waiting and len(rows) < slots:
            rows.append(waiting.popleft())
        expected += 1 + 0.25 * len(rows)
        rows = [left - 1 for left in rows if left > 1]
    assert found.seconds == pytest.approx(expected)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 9), prompts=st.integers(1, 5), learn=st.integers(0, 9))
def test_async_at_staleness_0_takes_the_time_of_sync(seed, slots, prompts, learn):
    shape = np.random.default_rng(seed)
    work = Drawn(int(shape.integers(1, 5)), float(shape.integers(3, 20)), 0.8, 40, prompt=5)
    t = times(learn=learn, context=0.01, prefill=0.25, receive=2.0)
    sync, stream = (run(t, roles, 0, work, prompts, slots) for roles in (IN_TURN, SPLIT))
    assert sync.seconds == pytest.approx(stream.seconds) and sync.tokens == stream.tokens

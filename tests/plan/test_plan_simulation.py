"""The plan's simulated time: schedules worked by hand, a slow engine written plainly, and laws that any run obeys."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.plan.engine import Engine, Group
from rl.plan.service_times import EngineTimes, LearnerTimes, ServiceTimes
from rl.plan.simulation import Load, Ranks, Scorers, generate, one_step_off, sync
from rl.plan.stream import asynchronous
from rl.plan.workload import Drawn
from rl.samples.schedule import ScheduleArgs

ONE = Ranks(engines=1, learners=1)


class Fixed:
    """Responses of these lengths; the last ticket's for all after it."""

    def __init__(self, *lengths, prompt=0):
        self.lengths, self.prompt = lengths, prompt

    def group(self, ticket):
        return self.prompt, list(self.lengths[min(ticket, len(self.lengths) - 1)]), True


def times(learn=0.0, step=1.0, source="hand", **more) -> ServiceTimes:
    """A decode step takes a second however many responses there are, training `learn` seconds, all else nothing."""
    publish = more.pop("publish", 0.0)
    return ServiceTimes(EngineTimes((1,), (step,), **more), LearnerTimes(step=learn, publish=publish), source)


def schedule(**flags) -> ScheduleArgs:
    return ScheduleArgs(ppo_mini_batch_size=flags.pop("prompts", 1), **flags)


def test_sync_by_hand():
    """The first token is the prefill's, so that 5 tokens take 4 steps; the longest response decides, then training."""
    out = sync(times(learn=3), Load(2, 1, slots=8), ONE, Fixed([5, 2], [3, 3], [7, 1]), steps=3)
    assert out.ends == [4 + 3, 7 + 6 + 3, 16 + 6 + 3] and out.learned == [3, 3, 3] and out.generated == [4, 6, 6]
    assert out.mean_age == [0, 0, 0]


def test_over_sampling_by_hand():
    """One prompt a step, another under way beside it: ticket 0 needs 8 steps of the engine, and tickets 1 and 2 pass it by."""
    work, ahead = Fixed([9], [3], [5], [4]), Load(1, 1, slots=8, surplus=1)
    out = sync(times(learn=2), ahead, ONE, work, steps=3)
    assert out.ends == [2 + 2, 4 + 4 + 2, 10 + 2 + 2], "ticket 0 has 2 of its steps in each step of training"
    assert out.tokens == [3, 5, 9] and out.mean_age == pytest.approx([0, 0, 2 - (3 * 0 + 4 * 1 + 2 * 2) / 9])
    assert out.max_age == [0, 0, 2] and out.partial == [0, 0, 1]
    again = sync(times(learn=2, prefill=0.5, prefill_token=0.25), ahead, ONE, work, steps=2)
    assert again.ends == [0.5 + 4, 4.5 + (0.5 + 0.25 * 2) + 0.5 + 6], "2 tokens of ticket 0 are prefilled again"


@pytest.mark.parametrize("engines", [1, 3])
def test_over_sampling_does_not_wait_for_long_tails(engines):
    """And trains every ticket once."""
    work, ranks, rates = Drawn(2, 30, 1.2, 2000, seed=3), Ranks(engines, engines, colocated=True), []
    for surplus in (0, 4, 12):
        out = sync(times(learn=5), Load(12, 1, slots=64, surplus=surplus), ranks, work, steps=60)
        assert len(out.tokens) == 60 and sum(out.tokens) <= sum(sum(work.group(t)[1]) for t in range(12 * 60 + surplus))
        rates.append(out.tokens_per_second)
    assert rates == sorted(rates) and rates[2] > 1.3 * rates[0]


def test_slots_are_filled_again_as_responses_end():
    """Two slots for lengths 3 and 6, then 4: it starts after 2 steps, and ends after 3 more."""
    out = sync(times(), Load(3, 1, slots=2), ONE, Fixed([3], [6], [4]), steps=1)
    assert out.ends == [5]


def test_engines_share_the_tickets_and_wait_for_the_longest():
    out = sync(times(learn=1), Load(4, 1, slots=8), Ranks(2, 2, colocated=True), Fixed([5], [9], [3], [2]), steps=1)
    assert out.ends == [8 + 1] and out.idle == [8 - 4], "tickets 0 and 2 are the first engine's: it ends after 4 steps"


def test_one_step_off_by_hand():
    """Batches of 4 s, training of 3 s and a publish of 1 s: the generator is never kept waiting."""
    out = one_step_off(times(learn=3, publish=1), Load(1, 1, slots=8), ONE, Fixed([5]), steps=4)
    assert out.ends == [4 + 4, 8 + 4, 12 + 4, 16 + 4] and out.waited == [4, 0, 0, 0]
    assert out.mean_age == [0, 1, 1, 1]
    slow = one_step_off(times(learn=9, publish=1), Load(1, 1, slots=8), ONE, Fixed([5]), steps=4)
    assert slow.ends == [14, 24, 34, 44], "training decides, and the generator waits for its weights"
    assert slow.idle == [0, 0, 14 - 8, 6 + 24 - 18], "before batches 2 and 3, whose weights come at 14 and 24"


def test_async_by_hand():
    """Threshold 1: two tickets may start under version 0. Responses of 5 tokens, training of 3 s, one slot.

    Ticket 0 runs 0-4, ticket 1 4-8; the learner trains 0 at 4-7 and publishes, 1 at 8-11. Ticket 2 starts at 8 under version 1
    and ends at 12, with tokens of versions 1 and 2, trained under version 2.
    """
    out = asynchronous(times(learn=3), Load(1, 1, slots=1), ONE, Fixed([5]), schedule(), steps=4)
    assert out.ends == [7, 11, 15, 19] and out.waited == [4, 1, 1, 1]
    # 1: the version comes at 7, after 3 of ticket 1's 4 steps: 4 of its tokens are of version 0, trained under 1
    assert (
        out.mean_age == pytest.approx([0, 4 / 5, 4 / 5, 4 / 5]) and out.max_age == [0, 1, 1, 1] and out.partial == [0, 1, 1, 1]
    )
    assert out.account == "4 tickets started = 4 trained + 0 dropped + 0 in flight"


def test_new_weights_wait_for_unfinished_responses_where_these_may_not_be_partial():
    """One slot, training of 2 s. "keep": the version of 4 + 2 = 6 comes in the middle of ticket 1; "off": after it."""
    kept, off = (
        asynchronous(times(learn=2), Load(1, 1, slots=1), ONE, Fixed([5]), schedule(partial_rollout=how), steps=3)
        for how in ("keep", "off")
    )
    assert kept.ends == off.ends == [6, 10, 14] and kept.partial == [0, 1, 1] and off.partial == [0, 0, 0]
    assert kept.mean_age[1] == pytest.approx(3 / 5) and off.mean_age[1] == 1


def test_receiving_and_recomputing_take_the_engine_time():
    keep = times(learn=1, receive=10)
    out = asynchronous(keep, Load(1, 1, slots=1), ONE, Fixed([5]), schedule(), steps=2)
    assert out.ends == [5, 4 + 1 + 10 + 3 + 1], "the version comes at 5, after a step of ticket 1; three more steps after it"
    more = times(learn=1, receive=10, prefill=0.5, prefill_token=2.0)
    out = asynchronous(more, Load(1, 1, slots=1), ONE, Fixed([5], prompt=3), schedule(partial_rollout="recompute"), steps=2)
    first = 0.5 + 2 * 3 + 4
    assert out.ends == [first + 1, first + 7.5 + 10 + (0.5 + 2 * (3 + 1)) + 3 + 1], (
        "ticket 1's first step ends past the publish"
    )


def test_a_slow_reward_holds_a_group_back_not_the_engine():
    """Two responses end together; one scoring process of 3 s has the group ready after 6, two have it after 3."""
    for workers, ready in ((1, 6), (2, 3)):
        slow = times(learn=1, score=3, score_workers=workers)
        assert sync(slow, Load(1, 1, slots=8), ONE, Fixed([2, 2]), steps=1).ends == [1 + ready + 1]
        assert asynchronous(slow, Load(1, 1, slots=8), ONE, Fixed([2, 2]), schedule(), steps=1).ends == [1 + ready + 1]


def test_stale_groups_are_dropped_and_replaced():
    """Ticket 0 is slow: tickets 1, 2, ... pass it by, and when it comes its first token is too old."""
    flags = schedule(staleness_threshold=3, max_staleness=1, prompts=1)
    out = asynchronous(times(learn=1), Load(1, 1, slots=4), ONE, Fixed([14], [2]), flags, steps=8)
    assert out.dropped["stale"] >= 1 and max(out.max_age) <= 1 and "8 trained" in out.account


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), slots=st.integers(1, 9), n=st.integers(1, 4), prompts=st.integers(1, 5), learn=st.integers(0, 9)
)
def test_async_at_staleness_0_takes_the_time_of_sync(seed, slots, n, prompts, learn):
    """One engine, the weights at once: step by step the same seconds."""
    work, load = Drawn(n, 8, 0.8, 40, prompt=5, seed=seed), Load(prompts, 1, slots)
    t = times(learn=learn, context_token=0.01, prefill=0.25, prefill_row=0.125, receive=2.0)
    a = sync(t, load, ONE, work, steps=6)
    b = asynchronous(t, load, ONE, work, schedule(prompts=prompts, staleness_threshold=0), steps=6)
    assert np.array(a.ends) - 2.0 == pytest.approx(np.array(b.ends)), "sync counts taking the weights to the step before"
    assert b.mean_age == [0] * 6 and a.tokens == b.tokens


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 7),
    n=st.integers(1, 3),
    budget=st.integers(1, 40),
    padded=st.booleans(),
)
def test_the_engine_is_as_fast_as_one_that_counts_every_token(seed, slots, n, budget, padded):
    random = np.random.default_rng(seed)
    shapes = [(int(random.integers(1, 9)), random.integers(1, 15, n).tolist()) for _ in range(6)]
    t = EngineTimes((1, 4), (1.0, 2.5), 0.1, padded, prefill=0.5, prefill_token=0.25, prefill_row=0.125, finish=0.0625)
    waiting = deque((i, prompt, length) for i, (prompt, lengths) in enumerate(shapes) for length in lengths)
    rows, expected = [], 0.0  # [tokens of context, steps left]
    while waiting or rows:
        prompts = {}
        while waiting and len(rows) < slots:
            i, prompt, length = waiting[0]
            if prompts and i not in prompts and sum(prompts.values()) + prompt > budget:
                break
            prompts[i] = prompt
            waiting.popleft()
            rows.append([prompt, max(1, length - 1)])
            expected += 0.125
        expected += 0.5 * bool(prompts) + 0.25 * sum(prompts.values())
        for row in rows:
            row[0], row[1] = row[0] + 1, row[1] - 1
        read = len(rows) * max(row[0] for row in rows) if padded else sum(row[0] for row in rows)
        expected += max(0.5, 1.0 + 0.5 * (len(rows) - 1)) + 0.1 * read
        expected += 0.0625 * sum(row[1] == 0 for row in rows)
        rows = [row for row in rows if row[1]]
    groups = [Group(i, prompt, lengths, True) for i, (prompt, lengths) in enumerate(shapes)]
    _, found, _ = generate(Engine(t, slots, budget), Scorers(0, 1), groups, 0.0)
    assert found == pytest.approx(expected)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    prompts=st.integers(1, 4),
    period=st.integers(1, 3),
    threshold=st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2]),
    partial=st.sampled_from(["keep", "recompute", "off"]),
    stale=st.sampled_from([None, "drop", "wait"]),
    flat=st.sampled_from([0.0, 0.4]),
    engines=st.integers(1, 4),
    learn=st.sampled_from([0.0, 3.0, 30.0]),
    score=st.sampled_from([0.0, 1.5]),
)
def test_no_ticket_is_lost_and_no_token_too_old(seed, prompts, period, threshold, partial, stale, flat, engines, learn, score):
    args = schedule(
        prompts=prompts,
        publish_every=period,
        staleness_threshold=threshold,
        partial_rollout=partial,
        max_staleness=None if stale is None else int(np.ceil(threshold)),
        on_stale=stale or "drop",
    )
    steps, load = 9, Load(prompts, 1, 5, filter_groups=flat > 0, max_num_gen_batches=4)
    t = times(learn=learn, score=score, receive=0.5, publish=0.25)
    out = asynchronous(t, load, Ranks(engines, 2), Drawn(2, 8, 0.9, 60, flat=flat, seed=seed), args, steps)
    assert len(out.ends) == steps and out.ends == sorted(out.ends)
    assert f"= {steps * prompts:,} trained + {out.dropped.total():,} dropped" in out.account  # it adds up, or it had raised
    if threshold == 0 and period == 1:
        assert max(out.max_age) == 0
    if stale:
        assert max(out.max_age) <= args.max_staleness
    assert all(0 <= share <= 1 for share in (out.learner_idle, out.generator_idle))
    assert sum(out.waited) + sum(out.learned) <= out.ends[-1] + 1e-6

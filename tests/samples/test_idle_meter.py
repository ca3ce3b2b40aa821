"""Which side waits for the other, worked out by hand."""

from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed import HashStore

import train_async
import train_one_step_off
from rl.ranks import dist, launch
from rl.samples.channel import Outbox
from rl.samples.group import Group, Response
from rl.samples.idle_meter import IdleMeter
from rl.samples.stream import Batches, Stream
from rl.split import Split


@dataclass
class Clock:
    """The readings that the meter takes from a learner's timers."""

    wait: float
    elapsed: float

    def ledger(self) -> dict[str, float]:
        return {"wait": self.wait}


def job(generators: int, learners: int, nodes: int) -> Split:
    size, generating = (generators + learners) // nodes, generators // nodes
    alike = [launch.Node(f"host{i}", i * size, size, generating) for i in range(nodes)]
    return Split("learner", None, learners, generators, alike, 0, store=None, bridge=None)


def report(rank: int, wait: float, elapsed: float, score: float = 0.0) -> dict:
    counts = {"publish_seconds": 1.0, "publish_gb": 1.0, "publish_way": 0.0}
    return {"rank": rank, "elapsed": elapsed, "ledger": {"wait": wait, "score": score}, **counts}


def words(generators: int, learners: int, nodes: int, idle: tuple[float, float], score: float = 0.0) -> str:
    """Return the last words after start-up, during which learners wait for the engines, and three steps with these idle
    shares."""
    meter = IdleMeter(job(generators, learners, nodes))
    meter.metrics([report(rank, 0.9, 5.0) for rank in range(generators)], Clock(0.99, 100.0))
    for _ in range(3):
        meter.metrics([report(rank, idle[0], 2.0, score) for rank in range(generators)], Clock(idle[1], 2.0))
    (text,) = meter.last_words()
    return text


@pytest.mark.parametrize(
    ("job", "idle", "expected"),
    [
        ((1, 1, 1), (0.0, 0.1), "of the time, learners 10%"),
        ((2, 1, 1), (0.0, 0.1), "2 to 1 is the best split of 3 ranks (2.1 to 0.9 would balance exactly)"),
        ((2, 2, 1), (0.0, 0.75), "3 to 1 would balance 4 ranks better (3.2 to 0.8 exactly): --generators 3"),
        ((4, 4, 2), (0.0, 0.1), "4 to 4 is the best split of 8 ranks (4.2 to 3.8 would balance exactly)"),
        ((2, 2, 2), (0.0, 0.75), "of the time, learners 75%"),
        ((2, 6, 2), (0.0, 0.75), "4 to 4 would balance 8 ranks better (4.6 to 3.4 exactly): --generators 2 on each of 2 nodes"),
        ((4, 4, 2), (0.75, 0.0), "2 to 6 would balance 8 ranks better (1.6 to 6.4 exactly): --generators 1 on each of 2 nodes"),
        ((1, 1, 1), (0.4, 0.5), "they take turns"),
        ((2, 1, 1), (0.05, 0.09), "balanced"),
    ],
)
def test_advice_is_about_the_whole_jobs_ranks_and_leaves_start_up_out(job, idle, expected):
    text = words(*job, idle)
    assert text.startswith(f"generators waited {idle[0]:.0%} of the time, learners {idle[1]:.0%}") and expected in text


@pytest.mark.parametrize("split", [(1, 1, 1), (2, 2, 1), (4, 4, 2)])
def test_generators_that_wait_for_graders_need_no_other_split(split):
    """Learners that wait for samples wait for the graders as well, however many ranks generate."""
    remedy = "try more --reward-workers, or faster tools with --env, before another split"
    slow = f"of the time, learners 99%: generators spent 95% of the time on scores; {remedy}"
    assert words(*split, (0.0, 0.99), score=0.95) == f"generators waited 0% {slow}"
    assert "turns" not in words(*split, (0.3, 0.5), score=0.3), "which side waits is the graders' doing"
    for idle, score in (((0.0, 0.99), 0.05), ((0.6, 0.05), 0.3)):  # hardly any scoring; learners that wait for nothing
        assert "scores" not in words(*split, idle, score)


def test_slow_graders_are_news_once_and_survive_a_resume():
    before, after = IdleMeter(job(1, 1, 1)), IdleMeter(job(1, 1, 1))
    for _ in range(3):
        before.metrics([report(0, 0.0, 10.0, score=0.8)], Clock(0.9, 10.0))
    assert "80% of the time on scores" in before.news() and before.news() == ""
    after.restore(before.state())
    assert after.last_words() == before.last_words()


def news(job_of: tuple[int, int, int], *idle: tuple[float, float]) -> tuple[list[str], list[str]]:
    """Return the messages at a validation after each step with these idle shares, and at the end."""
    meter = IdleMeter(job(*job_of))
    generators, said = range(job_of[0]), []
    meter.metrics([report(rank, 0.9, 5.0) for rank in generators], Clock(0.99, 100.0))
    said.append(meter.news())
    for generating, learning in idle:
        meter.metrics([report(rank, generating, 2.0) for rank in generators], Clock(learning, 2.0))
        said.append(meter.news())
    return said, meter.last_words()


def test_the_advice_is_repeated_when_it_changes_alone():
    """A change of a percent or two gives no message. Another split does."""
    said, _ = news((2, 2, 1), (0.0, 0.75), (0.0, 0.74), (0.01, 0.76), *[(0.9, 0.0)] * 30)
    assert said[0] == "", "too few steps"
    assert "--generators 3" in said[1] and said[2:4] == ["", ""]
    texts = [text.partition(": ")[2] for text in said if text]
    assert "--generators 1" in texts[-1] and len(texts) <= 5, "from 3, over a share or two between, to 1"


def test_nothing_is_advised_while_the_split_is_the_best_one():
    said, last = news((2, 2, 1), (0.1, 0.2), (0.1, 0.15), (0.0, 0.05))
    assert not any(said) and len(last) == 1
    said, _ = news((2, 2, 1), (0.0, 0.1), *[(0.0, 0.75)] * 9)
    assert "--generators 3" in "".join(said) and len([text for text in said if text]) == 1


@pytest.mark.parametrize("split", [(1, 1, 1), (2, 2, 2)])
def test_nothing_is_advised_where_one_split_alone_exists(split):
    said, last = news(split, (0.0, 0.75), (0.0, 0.0), (0.6, 0.0))
    assert not any(said) and len(last) == 1 and "waited" in last[0] and "split" not in last[0] and "balance" not in last[0]


def test_a_run_of_too_few_steps_says_nothing_at_its_end():
    assert news((2, 2, 1)) == ([""], [])


def test_nothing_is_advised_from_start_up_alone():
    meter = IdleMeter(job(1, 1, 1))
    meter.metrics([report(0, 0.9, 5.0)], Clock(0.99, 100.0))
    assert (meter.news(), meter.last_words()) == ("", [])


def test_a_resumed_run_keeps_its_idle_times_and_ignores_its_new_start():
    before, after = IdleMeter(job(1, 1, 1)), IdleMeter(job(1, 1, 1))
    for _ in range(2):
        before.metrics([report(0, 0.1, 10.0)], Clock(0.0, 10.0))
    after.restore(before.state())
    after.metrics([report(0, 0.9, 50.0)], Clock(0.99, 50.0))
    after.metrics([report(0, 0.3, 10.0)], Clock(0.0, 10.0))
    assert after.last_words()[0].startswith("generators waited 20% of the time, learners 0%")


def ends(ranks: dist.Ranks, kind: type) -> tuple[Batches | Stream, Outbox]:
    """Return a learner's and a generator's end of one ring."""
    script = train_async if kind is Stream else train_one_step_off
    args, nodes = script.Args(), [launch.Node("here", 0, 2, 1)]
    learners = Split("learner", ranks, 1, 1, nodes, 0, HashStore(), bridge=None)
    samples = kind(args, learners)
    samples.open()
    return samples, Outbox(args.schedule.split, replace(learners, role="generator", ranks=replace(ranks, local_rank=1)))


def publish(outbox: Outbox, wait: float) -> None:
    """Reports ten seconds up to a publish."""
    timer = SimpleNamespace(elapsed=10.0, ledger=lambda: {"wait": wait, "score": 0.0}, seconds=Counter(), restart=lambda: None)
    outbox.report(timer, {"bytes": 0, "way": 1.0})


@pytest.mark.parametrize("kind", [Batches, Stream])
def test_what_the_generators_report_of_the_last_publish_counts(ranks, kind):
    """The report arrives after the last step was logged."""
    samples, outbox = ends(ranks, kind)
    for wait in (0.9, 0.1):  # the first is of the start
        publish(outbox, wait)
        samples.inbox.receive()
        samples.metrics(1, Clock(0.0, 10.0))
    publish(outbox, 0.5)
    outbox.finish(unfinished=[])
    *_, summary = samples.close()
    assert summary.startswith("generators waited 30% of the time, learners 0%")


@pytest.mark.parametrize("kind", [Batches, Stream])
def test_samples_may_be_closed_twice(ranks, kind):
    """A user's script may close them before `run.finish()`."""
    samples, outbox = ends(ranks, kind)
    tokens = np.zeros(2, np.int32)
    for ticket in range(3):
        outbox.send_group(Group(ticket, tokens, "demo", [Response(tokens, tokens.astype(np.float32), tokens, "stop")]))
    samples.split.store.add("tickets/started", 4)
    publish(outbox, 0.9)
    samples.inbox.receive()
    samples.metrics(1, Clock(0.0, 10.0))  # of the start
    publish(outbox, 0.1)
    samples.inbox.receive()
    samples.metrics(1, Clock(0.0, 10.0))
    publish(outbox, 0.5)
    outbox.finish(unfinished=[3])
    lines = samples.close()
    assert "generators waited 30% of the time" in lines[-1]
    assert kind is Batches or "4 tickets started = 0 trained + 0 dropped + 4 in flight" in lines
    assert samples.close() == lines

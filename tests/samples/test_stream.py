"""The learners' end of a split job, with a generator's end of the same ring: who waited, and the last words."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import run_script
from torch.distributed import HashStore

import train_async
import train_one_step_off
from rl.errors import UserError
from rl.ranks import dist, launch
from rl.samples import channel
from rl.samples.channel import Outbox
from rl.samples.group import Group, Response
from rl.samples.stream import Batches, Stream
from rl.split import Split

TOKENS = np.zeros(2, np.int32)
RESPONSE = Response(TOKENS, TOKENS.astype(np.float32), TOKENS, "stop")


def ends(ranks: dist.Ranks, kind: type) -> tuple[Batches | Stream, Outbox]:
    """Return a learner's and a generator's end of one ring."""
    script = train_async if kind is Stream else train_one_step_off
    learners = Split("learner", ranks, 1, 1, [launch.Node("here", 0, 2, 1)], 0, HashStore(), bridge=None)
    samples = kind(script.Args(), learners)
    samples.open()
    return samples, Outbox(replace(learners, role="generator", ranks=replace(ranks, local_rank=1)))


def timer(elapsed: float, **shares: float) -> SimpleNamespace:
    """A rank's time since its last report. shares: of its ledger, except `held`, which is in seconds."""
    seconds = Counter({"held": shares.pop("held", 0.0), "update_weights": 2.0})
    return SimpleNamespace(elapsed=elapsed, ledger=lambda: shares, seconds=seconds, restart=lambda: None)


@pytest.mark.parametrize("kind", [Batches, Stream])
def test_who_waited_is_in_the_metrics(ranks, kind):
    samples, outbox = ends(ranks, kind)
    outbox.report(timer(10.0, wait=0.5, score=0.25, held=2.0), received=4 * 10**9)
    samples.inbox.receive()
    metrics = samples.metrics(1, timer(20.0, wait=0.1))
    expected = {
        "fully_async/trainer/idle_ratio": 0.1,
        "fully_async/rollouter/idle_ratio": 0.5,
        "fully_async/rollouter/held_ratio": 0.2,
        "ledger/generator_0/wait": 0.5,
        "ledger/generator_0/score": 0.25,
        "publish/seconds": 2.0,
        "publish/gb": 4.0,
        "publish/gb_per_s": 2.0,
    }
    assert metrics.items() >= expected.items()
    assert "publish/gb" not in samples.metrics(2, timer(20.0, wait=0.1)), "a report counts once"


@pytest.mark.parametrize("kind", [Batches, Stream])
def test_samples_may_be_closed_twice(ranks, kind):
    """A user's script may close them before `run.finish()`."""
    samples, outbox = ends(ranks, kind)
    for ticket in range(3):
        outbox.send_group(Group(ticket, TOKENS, "demo", [RESPONSE]))
    samples.split.store.add("tickets/started", 4)
    outbox.finish(unfinished=[3])
    lines = samples.close()
    assert lines == (["4 tickets started = 0 trained + 0 dropped + 4 in flight"] if kind is Stream else [])
    assert samples.close() == lines


def test_a_group_that_no_ring_takes_ends_the_run(ranks, monkeypatch):
    monkeypatch.setattr(channel, "RING_BYTES", 1 << 16)
    _, outbox = ends(ranks, Stream)
    with pytest.raises(UserError, match=r"a record of 80,\d+ bytes does not fit.* Lower --rollout-n or --max-response-length"):
        outbox.send_group(Group(0, np.zeros(20_000, np.int32), "demo", [RESPONSE]))


@pytest.mark.runs
def test_every_rank_has_all_groups_whoever_had_them():
    """Bit for bit and in ticket order."""
    done = run_script("tests/programs/gather.py", 50_000, ranks=3)
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {n} has all" for n in range(3)
    ]

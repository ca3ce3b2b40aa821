"""Generators that come and go: no ticket is lost or has two holders, and what is trained is what would have been."""

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import bits, marked, start, train
from kills import audit
from test_nodes import free_port
from torch.distributed import HashStore

from rl.elastic_tickets import Claims, key_of, reissue
from rl.schedule import drawn, open_tickets


class OwnStore:
    """A store that a thread may use beside others."""

    def __init__(self, store: HashStore):
        self.store = store

    def clone(self) -> "OwnStore":
        return self

    def __getattr__(self, name: str):
        return getattr(self.store, name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(4))
def test_every_ticket_has_one_holder_whoever_is_lost_and_comes_back(seed):
    rng, store = random.Random(seed), OwnStore(HashStore())
    again = rng.sample(range(20), 5) if seed % 2 else []
    open_tickets(store, drawn=20 if again else 0, again=again)
    dealt_with = {*range(20)} - {*again} if again else set()
    members = {number: Claims(store, list(again), number, 0) for number in range(3)}
    held, gone, zombies, lists = {number: [] for number in members}, set(), {}, 0
    deadline = time.monotonic() + 40
    while len(dealt_with) < 150:
        assert time.monotonic() < deadline, sorted({*range(150)} - dealt_with)[:5]
        for number, claims in {**members, **zombies}.items():
            claims.have(rng.randrange(1, 6), lists)
            if claims.reserve and rng.random() < 0.7:
                held[number].append(claims.start())
        for number in members:  # what is finished comes in; of those that were given up nothing does
            for ticket in [t for t in held[number] if rng.random() < 0.5]:
                held[number].remove(ticket)
                assert ticket not in dealt_with, f"{ticket} came twice"
                dealt_with.add(ticket)
        if rng.random() < 0.05 and len(gone) < 6:
            number = rng.choice(list(members))
            lost = members.pop(number)
            gone.add(number)
            if rng.random() < 0.5:  # it was only stopped for a while
                zombies[number] = lost
            newest = 3 + len(gone)
            members[newest], held[newest] = Claims(store, list(again), newest, 0), []
        if gone and rng.random() < 0.1:
            unsettled = [ticket for ticket in range(drawn(store)) if ticket not in dealt_with]
            lists += bool(reissue(store, lists + 1, unsettled, gone, all_lost=rng.random() < 0.5))
        time.sleep(1e-3)
    assert gone
    holders = Counter(ticket for number in members for ticket in [*held[number], *members[number].reserve])
    assert max(holders.values(), default=1) == 1 and not {*holders} & dealt_with
    assert all(int(store.get(key_of(t)).split(b".")[0]) not in gone for t in holders)


class Job:
    """A torchrun of one rank that learns, or of ranks that generate, as processes with a mark."""

    def __init__(self, flags: list, ranks: int, generators: int, restarts: int = 0):
        arguments = ["--max-restarts", restarts, "train_async.py", *flags, "--generators", generators]
        env = {"SPARE_RANKS": str(ranks * restarts)}
        self.process, self.mark = start(*arguments, ranks=ranks, env=env)

    def signal(self, number: int, only: str = "") -> None:
        """To all of its processes; only: to those with that at the end of their names."""
        for pid, name, _, _ in list(marked(self.mark)):
            if name.endswith(only):
                os.kill(pid, number)

    def end(self, seconds: float = 100) -> tuple[int, str]:
        text, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, text


@contextmanager
def jobs(directory: Path, *flags):
    """`job(generators=0)` starts the learners' job, or one that joins; in the end nothing is left of them."""
    started = []
    flags = ["--elastic-generators", f"127.0.0.1:{free_port()}", "--output-dir", directory, "--experiment-name", "run", *flags]

    def job(generators: int = 0, restarts: int = 0) -> Job:
        started.append(Job(flags, max(1, generators), generators, restarts))
        return started[-1]

    try:
        yield job
    finally:
        for one in started:
            one.signal(signal.SIGKILL)
            one.process.kill()
            one.process.communicate()


def wait_for_step(run: Path, step: int, job: Job, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while True:
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        if any(json.loads(line)["step"] >= step for line in lines[-1:]):
            return
        assert job.process.poll() is None and time.monotonic() < deadline, job.end(0)
        time.sleep(0.02)


@pytest.mark.timeout(200)
def test_staleness_0_is_sync_bit_for_bit_though_generators_are_lost(demo_model, tmp_path):
    flags = ["--total-training-steps", 8, "--test-freq", 0]
    _, theirs, _ = train("train_sync.py", *flags, out=tmp_path / "sync", ranks=1)
    with jobs(tmp_path, *flags, "--staleness-threshold", 0, "--node-timeout", 5) as job:
        learners, lost = job(), job(generators=1)
        wait_for_step(tmp_path / "run", 3, learners)
        job(generators=1)
        lost.signal(signal.SIGKILL)
        code, text = learners.end()
        assert code == 0 and "(member 1) are gone: " in text and "64 tickets started = 64 trained" in text, text
    assert bits(tmp_path / "run") == bits(theirs)
    audit(tmp_path / "run", steps=8)

"""Generators that come and go: no ticket is lost or has two holders, and what is trained is what would have been."""

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import node_losses
import pytest
import torch
from helpers import bits, marked, start, train
from kills import audit
from test_nodes import free_port
from torch.distributed import HashStore, PrefixStore, TCPStore

from rl.generation.embedded.engine import TransformersEngine
from rl.ranks.dist import Ranks
from rl.ranks.launch import Node
from rl.samples.claims import Claims, key_of, reissue
from rl.samples.control import ControlBlock
from rl.samples.tickets import Tickets, drawn, open_tickets, started
from rl.split import Split
from rl.transport import elastic
from rl.transport.elastic import Crew, JoiningBridge, Lobby, MemberHeartbeat, Seat, sealed
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber
from train_async import Args


class OwnStore:
    """A store that a thread may use beside others."""

    def __init__(self, store: HashStore):
        self.store = store

    def clone(self) -> "OwnStore":
        return self

    def __getattr__(self, name: str):
        return getattr(self.store, name)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(4))
def test_every_ticket_has_one_holder_whoever_is_lost_and_comes_back(seed):
    rng, store = random.Random(seed), OwnStore(HashStore())
    again = rng.sample(range(20), 5) if seed % 2 else []
    open_tickets(store, drawn=20 if again else 0, again=again)
    dealt_with = {*range(20)} - {*again} if again else set()
    members = {number: Claims(store, list(again), number, 0) for number in range(3)}
    held, gone, zombies, lists = {number: [] for number in members}, set(), {}, 0
    deadline = time.monotonic() + 120
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

    def __init__(self, flags: list, ranks: int, generators: int, restarts: int = 0, imported: str = "plain"):
        arguments = ["--max-restarts", restarts, "train_async.py", *flags, "--generators", generators]
        env = {"SPARE_RANKS": str(ranks * restarts)}
        self.process, self.mark = start(*arguments, ranks=ranks, env=env, imported=imported)

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

    def job(generators: int = 0, restarts: int = 0, imported: str = "plain") -> Job:
        started.append(Job(flags, max(1, generators), generators, restarts, imported))
        return started[-1]

    try:
        yield job
    finally:
        for one in started:
            one.signal(signal.SIGKILL)
            one.process.kill()
            one.process.communicate()


def wait_for_step(run: Path, step: int, process: subprocess.Popen, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while True:
        text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
        if any(json.loads(line)["step"] >= step for line in text[: text.rfind("\n") + 1].splitlines()):  # the last may be half
            return
        assert process.poll() is None and time.monotonic() < deadline, f"no step {step}: see the learners' console"
        time.sleep(0.02)


SILENT = 5.0  # seconds


class Member:
    """A member's rank, a thread: receives what is sent to it and keeps it, until it stands still."""

    def __init__(self, store: TCPStore, number: int, stands_still_at: int | None = None):
        ranks = SimpleNamespace(rank=0, world_size=1, is_main=True)
        self.seat, self.got = Seat(number, "there", 1), []
        life, nodes = PrefixStore("life", store.clone()), [Node("there", 0, 1, 0)]
        self.bridge = JoiningBridge(store.clone(), number, SimpleNamespace(ranks=ranks, nodes=nodes))
        self.pulse = MemberHeartbeat("generator 0", number, nodes, SILENT, life)
        self.stands_still_at = stands_still_at
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        self.bridge.open()
        while len(self.got) != self.stands_still_at:
            data = torch.empty(300_000)
            try:
                self.bridge.broadcast(data).wait()
            except RuntimeError:  # the test has ended
                return
            self.got.append((int(data[0]), bool((data == data[0]).all())))
        self.pulse._ended.set()
        self.pulse.store = HashStore()  # and no last word


class Source:
    """Publishes numbers, as Publisher does weights."""

    def __init__(self, links):
        self.links, self.version = links, 0

    def greet(self, link, tell) -> None:
        tell(self.version)
        link.broadcast(torch.full((300_000,), float(self.version))).wait()
        self.links.add(link, self.version)

    def publish(self, version: int) -> None:
        self.version = version
        self.links.begin(version)
        self.links.broadcast(torch.full((300_000,), float(version))).wait()


@pytest.mark.timeout(150)
def test_a_publish_reaches_all_but_those_that_are_lost(monkeypatch):
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    lobby = Lobby(store.clone(), None, SILENT)
    source, crew = Source(lobby.links), Crew(SimpleNamespace(generators=0), "localhost:1", lobby)
    lobby.serve(source)

    def until(done) -> None:
        deadline = time.monotonic() + 120
        while not done():
            for news in crew.news():
                crew.change(news)
            assert time.monotonic() < deadline
            time.sleep(0.01)

    store.add("members", 2)
    steady, lost = Member(store, 1), Member(store, 2, stands_still_at=2)
    until(lambda: len(lobby.links.all) == 2)
    for version in range(1, 4):  # the last is sent while one stands still
        source.publish(version)
    until(lambda: list(crew.members) == [1] and list(crew.gone) == [2])
    store.add("members", 1)
    late = Member(store, 3)
    until(lambda: len(late.got) == 1)
    until(lambda: len(lobby.links.all) == 2)
    source.publish(4)
    until(lambda: len(late.got) == 2 and len(steady.got) == 5 and len(crew.members) == 2)
    assert steady.got == [(version, True) for version in range(5)] and late.got == [(3, True), (4, True)]
    assert lost.got == [(0, True), (1, True)] and crew.names == {"1.0", "3.0"} and late.bridge.first == 3
    assert crew.open(sealed(b"Gx", 1), b"G") == b"Gx" and crew.came[1] == 1, "what comes from a member counts"
    assert crew.open(sealed(b"Gx", 2), b"G") is None and crew.came[2] == 0, "but not from one that was given up"
    for member in (steady, late):
        member.pulse.finish()
    until(lambda: set(crew.gone) == {1, 2, 3})


def test_a_member_that_is_not_there_when_it_is_let_in_is_told_to_join_anew(monkeypatch):
    monkeypatch.setattr(elastic, "OPEN_SECONDS", 0.5)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    lobby, member = Lobby(store.clone(), None, SILENT), store.add("members", 1)
    store.set(f"ready/{member}", json.dumps(["there", 1, 1]))
    store.wait([f"life/gone/{member}"], timedelta(seconds=60))
    assert Seat(member, "there", 1).why_it_fails(store, False) == elastic.GIVEN_UP and not lobby.news


@pytest.mark.timeout(150)
def test_a_generator_that_joins_starts_nothing_before_its_first_weights(models):
    """It is let in with weights that have been sent and are not announced yet. Those that are announced are not for it, nor is
    what may start under them."""
    store, args = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), Args()
    lobby, ranks = Lobby(store.clone(), None, SILENT), Ranks(0, 1, 0, torch.device("cpu"))
    crew = Crew(SimpleNamespace(generators=0), "localhost:1", lobby)
    learners = Split("learner", ranks, 1, 0, [Node("here", 0, 1, 0)], 0, store, lobby.links, elastic=crew)
    generators = Split("generator", ranks, 0, 1, [Node("there", 0, 1, 1)], 0, store, None, elastic=Seat(1, "there", 1))
    engines = [TransformersEngine(models["qwen2-tied"], max_length=64) for _ in range(2)]
    parameters = dict(engines[0].model.named_parameters())
    learner = SimpleNamespace(parameters=parameters, frozen=(), weights=lambda *_: parameters.items())
    publisher, said = Publisher(learner, learners, torch.float32), ControlBlock(learners)
    open_tickets(store)
    publisher.publish(2)
    said.update(version=2)
    publisher.publish(3)

    store.add("members", 1)
    bridge = JoiningBridge(store.clone(), 1, generators)
    subscriber, control = Subscriber(replace(generators, bridge=bridge), engines[1]), ControlBlock(generators)
    tickets = Tickets(store, args, total=100)

    def may_start() -> tuple[int, list[int]]:
        """The version that counts there, and the tickets that start under the weights it has."""
        state = subscriber.in_force(control.read(), busy=False)
        return state.version, tickets.take(4, 0, engines[1].version, state)

    assert control.read().version == 2 and bridge.first == 3
    assert may_start() == (-1, []) and started(store) == 0
    said.update(version=3)
    control.wait_for(3)
    assert may_start() == (3, [])
    subscriber.receive(3)
    assert may_start() == (3, [0, 1, 2, 3]) and started(store) == 4


FLAGS = ["--total-training-steps", 10, "--test-freq", 0, "--max-response-length", 24]


@pytest.fixture(scope="module")
def of_sync(demo_model, tmp_path_factory) -> dict[str, bytes]:
    return bits(train("train_sync.py", *FLAGS, out=tmp_path_factory.mktemp("sync"), ranks=1)[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["killed", "told to leave"])
def test_staleness_0_is_sync_bit_for_bit_though_generators_are_lost(of_sync, tmp_path, how):
    """And no ticket is lost."""
    with jobs(tmp_path, *FLAGS, "--staleness-threshold", 0) as job:
        learners, lost = job(), job(generators=1)
        wait_for_step(tmp_path / "run", 1, learners.process)
        if how == "killed":
            lost.signal(signal.SIGKILL)
        else:
            lost.process.send_signal(signal.SIGTERM)  # torchrun's
        job(generators=1)
        code, text = learners.end(200)
        assert code == 0 and "(member 1) are gone: " in text and "80 tickets started = 80 trained" in text, text
        assert lost.end()[0] != 0
    assert bits(tmp_path / "run") == of_sync
    audit(tmp_path / "run", steps=10)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_that_are_lost_at_random_moments(demo_model, network):
    """Network, power, ranks, whole machines that stand still; learners, too."""
    network(3)  # skips where there are none
    node_losses.main(node_losses.Args(losses=5, seed=1, ranks=2), fresh=False)

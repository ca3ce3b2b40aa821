"""When ranks or nodes fall silent, an error names them and the job ends on every node."""

import re
import socket
import threading
import time

import pytest
from test_nodes import run_nodes
from torch.distributed import HashStore

from rl.ranks import failures, heartbeat, watchdog
from rl.ranks.heartbeat import ROUNDS, Signs

HOST = re.escape(socket.gethostname())
STOPPED = {  # what is stopped, and what the other node says of it
    "node 1": f"node 2, {HOST}: no sign of life of all its ranks for 4 s ",
    "node 0": f"node 1, {HOST}, has not answered for 4 s ",
    "rank 3": f"node 2, {HOST}: no sign of life of rank 3 for 4 s ",
    "rank 0": f"node 1, {HOST}: no sign of life of rank 0 for 4 s ",
}


@pytest.mark.slow  # tests/ranks/test_nodes.py has a node that ends in the plain run
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("what", "reported"), STOPPED.items())
def test_who_falls_silent_is_named_and_every_node_ends(what, reported):
    consoles = run_nodes([(2, ["tests/programs/silent_ranks.py", *what.split()])] * 2)
    victim = int(what == "node 1" or what == "rank 3")
    codes = [code for code, _ in consoles]
    assert codes[victim] == 1 and codes[1 - victim] in ((1, 137, -9) if what == "node 0" else (1,)), consoles
    assert "the other node has ended\n" in consoles[victim][1], "it did not end by itself"
    for number, (_, console) in enumerate(consoles):
        if number != victim or "rank" in what:
            # A rank that loses its connections before it has looked often enough stops because of what the other node says.
            said = re.findall(rf"^\[{HOST} rank \d\] (?:error|rank \d stops): {reported}.*--node-timeout", console, re.M)
            assert len(said) == len(re.findall(r"\] (?:error|rank \d stops|rank \d failed):", console)) == 1, console


def signs(store, **of):
    for rank, sign in of.items():
        store.set(f"pulse/{rank.removeprefix('r')}", str(sign))


def test_only_too_many_looks_at_the_same_sign_are_silence():
    """The clock does not count, because the watching rank itself may have been stopped. A rank that has not begun or has ended
    is not missed."""
    store, watched = HashStore(), Signs([1, 2, 3, 4])
    signs(store, r1=0, r2=5, r3=5)
    store.set(f"{watchdog.ENDED}/2", "")
    looks = []
    for number in range(ROUNDS + 2):
        signs(store, r3=number // 3)
        watched.look(store)
        looks.append(watched.unchanged(store, ROUNDS))
    assert looks == [[]] * ROUNDS + [[1]] * 2
    signs(store, r1=1)
    watched.look(store)
    assert watched.unchanged(store, ROUNDS) == [], "it was only slow"


def test_who_was_stopped_itself_does_not_accuse_those_who_have_ended(monkeypatch, capsys):
    """The others ended because of this rank and left the cause. When it looks again, they are silent for good."""
    store = HashStore()
    monkeypatch.setattr(failures, "_open_store", lambda: store)
    monkeypatch.setattr(heartbeat.watchdog, "speaking", threading.Lock())
    monkeypatch.setattr(heartbeat.Heartbeat, "_guard", lambda self: None)  # it would end this process in earnest afterwards
    ended = threading.Event()
    monkeypatch.setattr(heartbeat.os, "_exit", lambda code: (ended.set(), threading.Event().wait()))
    failures.record("node 1, a: no sign of life of rank 0 for 0.2 s (--node-timeout)")
    signs(store, r1=7)
    heartbeat.Heartbeat(0, [heartbeat.launch.Node("a", 0, 1, 0), heartbeat.launch.Node("b", 1, 1, 0)], 0.2, store)
    assert ended.wait(60)
    assert capsys.readouterr().err.startswith("error: node 1, a: no sign of life of rank 0")


class Silent(HashStore):
    """A store that no longer answers and does not fail either: its machine has lost power."""

    def __init__(self):
        super().__init__()
        self.answers = True

    def check(self, keys):
        while not self.answers:
            time.sleep(0.1)
        return super().check(keys)


def test_a_store_that_does_not_answer_ends_the_rank(monkeypatch):
    ended = []
    monkeypatch.setattr(heartbeat, "TICK", 0.02)
    monkeypatch.setattr(heartbeat.Heartbeat, "_end", lambda self, verdict, **_: ended.append(verdict))
    nodes = [heartbeat.launch.Node(f"host{i}", i, 1, 0) for i in range(2)]
    store = Silent()
    watched = heartbeat.Heartbeat(1, nodes, 0.2, store)
    time.sleep(0.5)
    assert not ended and watched.rounds > 1, "there is no sign of rank 0 yet: it may not have begun"
    store.answers = False
    for _ in range(100):
        time.sleep(0.1 if not ended else 0)
    assert ended == ["node 1, host0, has not answered for 0.2 s (--node-timeout)"]

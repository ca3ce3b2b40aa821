"""The tokens of a batch are sent to the learners that train them and to nobody else."""

import re

import pytest
from helpers import run_script


def bytes_by_node(text: str) -> list[list[int]]:
    """Return for each node: bytes received, bytes it trains but did not have, bytes it trains in total."""
    return [list(map(int, numbers)) for numbers in re.findall(r"rank \d+: (\d+) came, (\d+) of (\d+) trained", text)]


CASES = ["1 a b", "2 a a b b", "1 a a b c", "2 a b"]  # learners that share a sequence; of each learner its node


@pytest.mark.parametrize("case", [*CASES[:2], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[2:])])
def test_each_node_has_what_it_trains_and_the_batch_is_the_same(case):
    """Bit for bit: the data that every learner has on all responses, and its own micro-batches with images and routes."""
    done = run_script("tests/programs/delivery.py", *case.split(), ranks=len(case.split()) - 1)
    nodes = bytes_by_node(done.stdout)
    assert len(nodes) == len(set(case.split()[1:]))
    for came, elsewhere, trained in nodes:
        assert 0 < elsewhere <= came < elsewhere + 0.1 * trained


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [2, 3])
def test_what_the_links_carry(network, nodes):
    """The machines count all bytes they receive, including headers, handshakes and the set-up."""
    machines = network(nodes)
    consoles = machines.start([(1, ["tests/programs/delivery.py", 1])] * nodes).wait(600)
    assert [code for code, _ in consoles] == [0] * nodes, consoles
    for node, (_, console) in zip(machines.nodes, consoles, strict=True):
        ((_, _, trained),) = bytes_by_node(console)
        assert node.traffic()[0] < 1.1 * trained

"""Records between ranks: they enter each node once, are shared in its memory, and are freed when no rank holds them."""

import re

import pytest
from helpers import run_script


@pytest.mark.parametrize("nodes", ["a a", "a b", "a a a b b"])
def test_every_rank_has_all_records_and_a_node_receives_those_of_others_once(nodes):
    done = run_script("tests/programs/exchange.py", *nodes.split(), ranks=len(nodes.split()))
    sizes = {int(rank): (int(came), int(theirs)) for rank, came, theirs in re.findall(r"rank (\d): (\d+) (\d+)", done.stdout)}
    assert sorted(sizes) == [*range(len(nodes.split()))]
    assert all(came == theirs for came, theirs in sizes.values())
    assert len(set(nodes.split())) == 1 or max(came for came, _ in sizes.values()) > 100_000

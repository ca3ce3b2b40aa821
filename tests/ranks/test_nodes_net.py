"""Jobs on several machines, each with its own network, hostname, processes and shared memory (tests/tools/nodes.py)."""

import json
from functools import cache
from pathlib import Path

import pytest
from helpers import bits, eventually, train

FLAGS = ["--total-training-steps", 3, "--test-freq", 0, "--max-response-length", 24]


def run(network, of_nodes: list[tuple[int, int]], script: str, *flags, out: Path, **how) -> tuple[Path, list[str]]:
    """Runs a script on nodes of (ranks, generators) each; returns the run's directory and each node's console."""
    roles = [[] if script == "train_sync.py" else ["--generators", generators] for _, generators in of_nodes]
    lines = [(ranks, [script, *flags, "--output-dir", out, *role]) for (ranks, _), role in zip(of_nodes, roles, strict=True)]
    consoles = network.start(lines, **how).wait(600)
    assert [code for code, _ in consoles] == [0] * len(of_nodes), "\n----\n".join(text for _, text in consoles)
    assert eventually(lambda: not network.left_over()), network.left_over()
    (directory,) = out.iterdir()
    return directory, [text for _, text in consoles]


@pytest.fixture(scope="module")
def on_one_node(demo_model, tmp_path_factory):
    """The weights after a script's run on this machine, by script and numbers of learners and generators."""

    @cache
    def weights(script: str, learners: int, generators: int = 0) -> dict[str, bytes]:
        role = ["--generators", generators] if generators else []
        return bits(train(script, *FLAGS, *role, out=tmp_path_factory.mktemp("one_node"), ranks=learners + generators)[1])

    return weights


@pytest.mark.runs
@pytest.mark.timeout(900)
def test_a_node_that_learns_and_one_that_generates(demo_model, tmp_path, network):
    directory, (first, second) = run(network(2), [(1, 0), (1, 1)], "train_async.py", *FLAGS, out=tmp_path)
    layout = [{"host": "node1", "ranks": {"0": "learner 0"}}, {"host": "node2", "ranks": {"1": "generator 0"}}]
    assert json.loads((directory / "config.json").read_text())["hardware"]["layout"] == layout
    assert "step 3/3" in first and "step 3/3" not in second


CASES = [  # script, (ranks, generators) of each node, rendezvous
    ("train_sync.py", [(2, 0), (1, 0)], "static"),
    ("train_one_step_off.py", [(1, 1), (1, 0), (1, 0)], "c10d"),
    ("train_async.py", [(1, 1), (1, 0), (3, 2)], "static"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("script", "of_nodes", "rendezvous"), CASES)
def test_nodes_train_bit_for_bit_what_one_node_trains(on_one_node, tmp_path, network, script, of_nodes, rendezvous):
    """With staleness 0, async equals sync."""
    learners = sum(ranks - generators for ranks, generators in of_nodes)
    more = ["--staleness-threshold", 0] if script == "train_async.py" else []
    directory, _ = run(network(len(of_nodes)), of_nodes, script, *FLAGS, *more, out=tmp_path, rendezvous=rendezvous)
    one_step_off = script == "train_one_step_off.py"
    assert bits(directory) == on_one_node(script if one_step_off else "train_sync.py", learners, int(one_step_off))

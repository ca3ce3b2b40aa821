"""Jobs on several machines, each with its own network, hostname, processes and shared memory (tests/tools/nodes.py)."""

import json
import os
import signal
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
    def weights(script: str, learners: int, generators: int = 0, steps: int = 3) -> dict[str, bytes]:
        role = ["--generators", generators] if generators else []
        flags = [*FLAGS, "--total-training-steps", steps, *role]
        return bits(train(script, *flags, out=tmp_path_factory.mktemp("one_node"), ranks=learners + generators)[1])

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
    ("train_async.py", [(1, 0), (2, 2)], "c10d"),
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


KINDS = {
    "routes": ["--model", "demo-moe", "--router-replay", "R3", "--expert-parallel", 2],
    "images and adapters": ["--model", "demo-vl", "--freeze-vision-tower", "--lora-rank", 8, "--lr", 1e-3],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_on_two_nodes_that_learn_and_one_that_generates(kind, tmp_path, network):
    flags = [*KINDS[kind], "--total-training-steps", 2, "--test-freq", 0, "--staleness-threshold", 0]
    directory, _ = run(network(3), [(1, 0), (1, 0), (1, 1)], "train_async.py", *flags, out=tmp_path / "nodes")
    _, on_one, _ = train("train_async.py", *flags, "--generators", 1, out=tmp_path / "one", ranks=3)
    assert bits(directory) == bits(on_one)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_that_are_killed_on_any_node_start_again_with_all_others(on_one_node, tmp_path, network):
    """torchrun counts the restart only on the node that failed. A learner, and later a generator. The final weights equal those
    of an uninterrupted run."""
    machines, of_nodes = network(3), [(1, 0), (1, 0), (1, 1)]
    flags = [*FLAGS, "--total-training-steps", 9, "--output-dir", tmp_path, "--experiment-name", "run", "--save-freq", 1]
    flags += ["--staleness-threshold", 0, "--max-ckpt-to-keep", 1]
    job = machines.start([(n, ["train_async.py", *flags, "--generators", g]) for n, g in of_nodes], restarts=2)
    saved = lambda: max((int(path.name[5:]) for path in tmp_path.glob("run/step_*[0-9]")), default=0)  # noqa: E731
    for node, step in ((1, 1), (2, 3)):
        assert eventually(lambda step=step: saved() >= step or job.processes[0].poll() is not None, 300), job.wait(10)
        os.kill(machines.nodes[node].ranks()[0], signal.SIGKILL)
    consoles = job.wait(600)
    assert [code for code, _ in consoles] == [0, 0, 0], consoles
    assert eventually(lambda: not machines.left_over()), machines.left_over()
    assert sum(console.count("resumes after step") for _, console in consoles) == 2, consoles
    assert bits(tmp_path / "run") == on_one_node("train_sync.py", 2, steps=9)

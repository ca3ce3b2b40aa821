"""Jobs of several nodes, with one torchrun each: they train what one node trains, all refuse an impossible layout, and each
console says what happened. The nodes are those of tests/tools/nodes.py."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from helpers import ROOT, bits, command, environment, eventually, free_port, train
from torch.distributed import HashStore

from rl.ranks import launch


def refused(consoles: list[tuple[int, str]], message: str) -> bool:
    """Return whether each node ended with the message, printed once, and without a traceback of a rank."""
    for code, console in consoles:
        assert code == 1 and console.count("error: ") == 1, console
        assert re.search(rf"^error: {message}", console, re.M), console
        assert 'rl/ranks/process.py", line' not in console, console
        assert re.search(rf"^  traceback : rank \d on node\d failed: {message}", console, re.M), "torchrun's summary says so"
    return True


@pytest.mark.runs
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("generators", "lacking"), [((0, 0), "generator"), ((2, 1), "learner")])
def test_a_job_without_a_role_is_refused_on_all_nodes(demo_model, tmp_path, network, generators, lacking):
    flags = ["train_async.py", "--output-dir", tmp_path, "--generators"]
    job = network(2).start([(ranks, [*flags, g]) for ranks, g in zip((2, 1), generators, strict=True)])
    counts = "; ".join(f"node{n} has {3 - n} ranks, {g} of them generators" for n, g in enumerate(generators, 1))
    assert refused(job.wait(120), f"--generators leaves no {lacking}: {counts}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("learners", "elsewhere"), [((1, 1), False), ((0, 1), True), ((0, 0), False)])
def test_a_node_prints_where_the_runs_messages_appear(monkeypatch, capsys, learners, elsewhere):
    """On the first that has a learner. A job without any joins one that has."""
    (own, other), store, here = learners, HashStore(), launch.Launch(0, 3, 0, 1, 0)
    monkeypatch.setattr(launch, "here", lambda: here)
    monkeypatch.setattr(launch, "_nodes", [])
    store.set("node/1", json.dumps(["other", 1, 2, 2 - other]))
    where = "the run's messages appear on node 2, other"
    launch.exchange_nodes(store, generators=1 - own)
    printed = capsys.readouterr().out
    assert printed.startswith("node 1 of 2, ") and printed.endswith(f"; {where}\n") == elsewhere == ("appear" in printed)


def failing(network, how: str) -> list[tuple[int, str]]:
    """The exit codes and consoles of two nodes with two ranks each, of which the second fails in this way."""
    return network(2).start([(2, ["tests/programs/node_failures.py", how])] * 2).wait(120)


@pytest.mark.runs
@pytest.mark.timeout(150)
def test_every_node_says_which_ranks_run_there_and_why_it_ends(network):
    (first_code, first), (second_code, second) = failing(network, "refused")
    assert "node 1 of 2, node1: ranks 0 to 1 of 4\n" in first
    assert "node 2 of 2, node2: ranks 2 to 3 of 4; the run's messages appear on node 1" in second
    assert first_code == second_code == 1
    assert second.count("error: ") == 1 == second.count("error: nothing is right here.\nNothing at all.\n"), second
    assert re.search(r"^rank [01] stops: rank [23] on node2 failed: nothing is right here\.$", first, re.M), first
    assert first.count(" stops: ") == 1 and "error: " not in first


@pytest.mark.runs
@pytest.mark.timeout(150)
def test_a_node_that_is_lost_ends_the_others_within_seconds(network):
    (code, first), _ = failing(network, "killed")
    lost = r"^rank [01] failed: it lost its connection to another rank, which has left no message here \(.*10\.77\.0\."
    assert code == 1 and len(re.findall(lost, first, re.M)) == 1 and "failed:\n" not in first, first


@pytest.mark.runs
@pytest.mark.timeout(200)
def test_all_ranks_meet_again_when_torchrun_restarts_them(tmp_path, network):
    """torchrun counts the restart only on the node that failed, and the store still holds the keys of the first start."""
    flags = ["tests/programs/node_failures.py", "restarted", tmp_path]
    consoles = network(2).start([(2, flags)] * 2, restarts=3).wait(150)
    assert [code for code, _ in consoles] == [0, 0], consoles
    starts = sorted(line for _, console in consoles for line in console.splitlines() if line.startswith("start "))
    assert starts == sorted(f"start {start} of rank {rank}" for start in range(3) for rank in range(4)), consoles


@pytest.mark.runs
@pytest.mark.timeout(150)
def test_nodes_that_share_no_directory_are_refused(demo_model, tmp_path, network):
    own = tmp_path / "own"  # a different directory on each node
    impatient = "from rl.ranks import dist; dist.SHARED_SECONDS = 1"
    flags = ["tests/programs/patched.py", impatient, ROOT / "train_sync.py", "--experiment-name", "run"]
    flags += ["--output-dir", own, "--total-training-steps", 1, "--no-val-before-train"]
    consoles = network(2, own=own).start([(1, flags)] * 2).wait(120)
    assert [code for code, _ in consoles] == [1, 1], consoles
    assert f"error: --output-dir: not all nodes see {own}/run. Give a directory" in consoles[0][1], consoles
    assert not list(tmp_path.rglob(".seen*"))


@pytest.mark.runs
def test_a_rank_of_another_job_is_refused():
    """Its number of ranks differs from that of the job it reached."""
    port, script = str(free_port()), ROOT / "tests/programs/node_failures.py"
    started = []
    for rank, world in ((0, 2), (1, 3)):
        env = environment(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=port)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command(script, "none"), cwd=ROOT, env=env, **pipes))
    try:
        text = started[1].communicate(timeout=60)[0]
        assert started[1].returncode == 1 and "error: rank 1 is one of 3, but the job it has reached has 2 ranks" in text, text
    finally:
        for process in started:
            process.kill()
            process.communicate()


# -------------------------------------------------------------------------------------------------------------- what they train

SHORT = ["--total-training-steps", 3, "--test-freq", 0, "--max-response-length", 24]


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
        return bits(train(script, *SHORT, *role, out=tmp_path_factory.mktemp("one_node"), ranks=learners + generators)[1])

    return weights


@pytest.mark.runs
@pytest.mark.timeout(900)
def test_a_node_that_learns_and_one_that_generates(demo_model, tmp_path, network):
    directory, (first, second) = run(network(2), [(1, 0), (1, 1)], "train_async.py", *SHORT, out=tmp_path)
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
    directory, _ = run(network(len(of_nodes)), of_nodes, script, *SHORT, *more, out=tmp_path, rendezvous=rendezvous)
    one_step_off = script == "train_one_step_off.py"
    assert bits(directory) == on_one_node(script if one_step_off else "train_sync.py", learners, int(one_step_off))

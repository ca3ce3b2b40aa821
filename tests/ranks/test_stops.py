"""SIGTERM to one rank stops the job as SIGTERM to all does; SIGKILL of one is reported by those that are left."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import bits_of, damage
from helpers import eventually, left_over, marked, run_script, start

pytestmark = pytest.mark.runs
FLAGS = ["--total-training-steps", 20, "--test-freq", 0, "--experiment-name", "run"]
LOADS = """
import time
from rl.learning.learner import Learner

def load_slowly(*arguments, load=Learner.__init__, **keywords):
    print("loading", flush=True)
    time.sleep({})
    load(*arguments, **keywords)

Learner.__init__ = load_slowly
"""
OURS = r"^(?:error|warning|SIGTERM|Ctrl-C|rank \d|learner \d|generator \d|step)\b.*"


def steps(out: Path) -> list[int]:
    """Return the steps that the run has logged so far."""
    file = out / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def strike(number: signal.Signals, rank: int | None, words: list, when: Callable[[str], bool]) -> tuple[int, str]:
    """Start the command on two ranks and send the signal to a rank, None: to all processes, once `when` says so of the console.
    Return torchrun's exit code and the console. Nothing may be left."""
    process, mark = start(*words, ranks=2)
    lines = []
    reader = threading.Thread(target=lambda: [lines.append(line) for line in process.stdout], daemon=True)
    reader.start()
    assert eventually(lambda: process.poll() is not None or when("".join(lines)), 200) and process.poll() is None, lines
    for pid in [pid for pid, name, *_ in marked(mark) if rank is None or name == f"{mark}-{rank}"]:
        os.kill(pid, number)
    process.wait(timeout=150)
    reader.join(timeout=60)
    assert eventually(lambda: not left_over(mark), 100), left_over(mark)
    return process.returncode, "".join(lines)


CASES = [  # script, rank, its name
    ("train_sync.py", 1, "rank 1"),
    ("train_async.py", 0, "learner 0 (rank 0)"),
]
KILLED = [
    ("train_sync.py", 0, "rank 0"),
    ("train_async.py", 1, "generator 0 (rank 1)"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("script", "rank", "name"), CASES)
def test_sigterm_to_one_rank_stops_the_job_and_it_resumes(script, rank, name, demo_model, tmp_path):
    words = [script, *FLAGS, "--output-dir", tmp_path]
    code, console = strike(signal.SIGTERM, rank, words, lambda _: len(steps(tmp_path)) >= 3)
    last = steps(tmp_path)[-1]
    saved = tmp_path / "run" / f"step_{last:06d}"
    assert code == 0 and 3 <= last < 20, console
    assert re.findall(OURS, console, re.M)[-1] == f"SIGTERM to {name}: stopped after step {last}; it resumes from {saved}"
    assert "Traceback" not in console and damage(saved) is None
    again = run_script(*words, ranks=2)
    assert f"resumes after step {last} of 20" in again.stdout and steps(tmp_path) == [*range(1, 21)]
    if script == "train_async.py":  # which samples a step gets depends on the clock
        return
    run_script(script, *FLAGS, "--output-dir", tmp_path / "whole", ranks=2)
    ours, theirs = (bits_of(out / "run" / "step_000020" / "training") for out in (tmp_path, tmp_path / "whole"))
    assert ours == theirs != {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_while_a_model_loads_ends_all_ranks_at_once(rank, demo_model, tmp_path):
    words = ["tests/programs/patched.py", LOADS.format(10_000), "train_async.py", *FLAGS, "--output-dir", tmp_path]
    code, console = strike(signal.SIGTERM, rank, words, lambda console: "loading" in console)
    name = ["learner 0 (rank 0)", "generator 0 (rank 1)"][rank]
    assert code != 0 and re.findall(OURS, console, re.M) == [f"SIGTERM to {name}: stopped; training had not begun"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("generators", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_learner_that_leaves_first_does_not_end_the_other(generators, tmp_path):
    """After SIGTERM a rank that exited has failed, unless it had come to its end. Generators exit meanwhile."""
    ready = tmp_path / "ready"
    process, mark = start("tests/programs/leaves.py", ready, generators, ranks=2 + generators)
    assert eventually(lambda: ready.exists() or process.poll() is not None, 200)
    process.send_signal(signal.SIGTERM)
    console = process.communicate(timeout=120)[0]
    assert "all is done\n" in console and "error: " not in console
    assert "forcefully exiting via" not in console and not left_over(mark), "a rank has not left by itself"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("script", "rank", "name"), KILLED)
def test_after_sigkill_the_last_line_names_the_rank(script, rank, name, demo_model, tmp_path):
    """torchrun sends SIGTERM to the others, which is no request to stop."""
    words = [script, *FLAGS, "--total-training-steps", 1000, "--output-dir", tmp_path]
    code, console = strike(signal.SIGKILL, rank, words, lambda _: len(steps(tmp_path)) >= 2)
    lines = re.findall(OURS, console, re.M)
    killed = rf"error: {name.partition(' (')[0]} \((rank \d, )?process \d+\) ended without a message: .* SIGKILL"
    assert code == 1 and re.match(killed, lines[-1]), console
    assert sum(not line.startswith("step ") for line in lines) == 1 and "SIGTERM to" not in console, console
    assert "forcefully exiting via" not in console
    assert not [*tmp_path.glob("run/step_*[0-9]")], "nobody has asked for a checkpoint"


@pytest.mark.timeout(900)
def test_a_node_of_generators_alone_that_is_to_leave_stops_all_nodes(demo_model, tmp_path, network):
    machines = network(2)
    flags = [*FLAGS, "--total-training-steps", 1000, "--output-dir", tmp_path]
    job = machines.start([(1, ["train_async.py", *flags, "--generators", g]) for g in (0, 1)])
    assert eventually(lambda: len(steps(tmp_path)) >= 2 or job.processes[0].poll() is not None, 200), job.wait(10)
    (generator,) = (pid for pid, name in machines.nodes[1].processes().items() if "-" in name)
    os.kill(generator, signal.SIGTERM)
    assert [code for code, _ in job.wait(200)] == [0, 0]
    first, second = (job.console(number) for number in (0, 1))
    last = steps(tmp_path)[-1]
    saved = tmp_path / "run" / f"step_{last:06d}"
    assert f"SIGTERM to generator 0 (rank 1) on node2: stopped after step {last}; it resumes from {saved}" in first
    assert "error: " not in first + second and damage(saved) is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["loading", "reward "])
def test_ctrl_c_ends_all_ranks_at_once(moment, demo_model, tmp_path):
    """Also ranks that wait in C++ for one that loads a model. A terminal sends it to all processes."""
    loads = 10_000 if moment == "loading" else 0
    words = ["tests/programs/patched.py", LOADS.format(loads), "train_async.py", *FLAGS, "--output-dir", tmp_path]
    code, console = strike(signal.SIGINT, None, words, lambda console: moment in console)
    assert code != 0 and not re.search(r'File ".*/(rl/|train_)', console) and "forcefully exiting via" not in console, console

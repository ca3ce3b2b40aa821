"""Jobs of two nodes, a torchrun each: what cannot work is refused on both, and each console says what happened."""

import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import ROOT, command, environment


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def run_nodes(nodes: list[tuple[int, list]], directories: list[Path] | None = None) -> list[tuple[int, str]]:
    """Runs a job of these nodes, (ranks, script and its flags) each; returns their exit codes and consoles."""
    meet = [
        "--nnodes",
        len(nodes),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{free_port()}",
        "--rdzv-id",
        "test",
    ]

    def run(number: int) -> tuple[int, str]:
        ranks, (script, *flags) = nodes[number]
        time.sleep(0.5 * number)  # the first to come is the first node
        how = {"cwd": directories[number] if directories else ROOT, "env": environment(PYTHONUNBUFFERED="1"), "timeout": 120}
        started = command(*meet, ROOT / script, *flags, ranks=ranks)
        started[2] = str(ROOT / started[2])
        done = subprocess.run(started, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how)
        return done.returncode, done.stdout

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, range(len(nodes))))


def refused(consoles: list[tuple[int, str]], message: str) -> bool:
    """Whether each node ended with the message, once, and no traceback of a rank."""
    for code, console in consoles:
        assert code == 1 and console.count("error: ") == 1 and re.search(rf"^error: {message}", console, re.M), console
        assert 'rl/process.py", line' not in console, console
        assert re.search(rf"^  traceback : {message}", console, re.M), "torchrun's summary names the cause"
    return True


HOST = re.escape(socket.gethostname())


@pytest.mark.timeout(150)
def test_split_nodes_of_different_sizes_are_refused_on_both(demo_model, tmp_path):
    flags = ["train_async.py", "--output-dir", tmp_path, "--total-training-steps", 1]
    consoles = run_nodes([(3, flags), (2, flags)])
    sizes = f"{HOST} has 3 ranks, 1 of them generators; {HOST} has 2 ranks, 1 of them generators"
    assert refused(consoles, f"the nodes differ: {sizes}")
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(150)
def test_split_nodes_of_different_roles_are_refused_on_both(demo_model, tmp_path):
    flags = ["train_one_step_off.py", "--output-dir", tmp_path, "--generators"]
    assert refused(run_nodes([(3, [*flags, 1]), (3, [*flags, 2])]), "the nodes differ: ")


@pytest.mark.timeout(150)
def test_every_node_says_which_ranks_run_there_and_why_it_ends():
    (first_code, first), (second_code, second) = run_nodes([(2, ["tests/programs/node_failures.py", "refused"])] * 2)
    assert f"node 1 of 2, {socket.gethostname()}: ranks 0 to 1 of 4\n" in first
    assert f"node 2 of 2, {socket.gethostname()}: ranks 2 to 3 of 4; the run's messages appear on node 1" in second
    assert first_code == second_code == 1
    assert second.count("error: nothing is right here.\nNothing at all.\n") == 1, second
    assert re.search(r"^rank [01] stops: rank [23] on .* failed: nothing is right here\.$", first, re.M), first
    assert first.count(" stops: ") == 1 and "error: " not in first


@pytest.mark.timeout(150)
def test_a_failure_is_told_in_full_on_its_own_node_and_in_a_line_on_the_other():
    (_, first), (_, second) = run_nodes([(2, ["tests/programs/node_failures.py", "raised"])] * 2)
    assert second.count("rank 3 failed:\n") == 1 and "LookupError: the second node has had enough" in second
    line = r"^rank [01] stops: rank 3 on .* failed: LookupError: the second node has had enough$"
    assert len(re.findall(line, first, re.M)) == 1 and "failed:\n" not in first, first


@pytest.mark.timeout(150)
def test_a_node_that_has_gone_is_named():
    (code, first), _ = run_nodes([(2, ["tests/programs/node_failures.py", "killed"])] * 2)
    assert code == 1
    assert re.search(rf"^rank [01] failed: ranks 2, 3 on {HOST} no longer answer$", first, re.M), first
    assert "failed:\n" not in first


@pytest.mark.timeout(150)
def test_directories_that_are_not_shared_are_refused_on_both(demo_model, tmp_path):
    """A relative path, in another directory on each node."""
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    flags = ["tests/programs/node_failures.py", "impatient", ROOT / "train_sync.py"]
    flags += ["--output-dir", "runs", "--total-training-steps", 1, "--no-val-before-train"]
    consoles = run_nodes([(1, flags)] * 2, places)
    assert refused(consoles, f"--output-dir: what {HOST} writes into .* does not show on {HOST}")
    assert not list(tmp_path.rglob(".seen*"))


def test_a_rank_of_another_job_is_refused():
    """Its number of ranks is another than the job's that it reached."""
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

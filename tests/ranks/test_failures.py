"""The report that a failing rank leaves for the other ranks. Jobs that hang on purpose: the message names a rank, the ranks
print their stacks, and no process is left."""

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers import ROOT, environment, eventually, left_over, run_script, start
from torch.distributed import DistBackendError, DistNetworkError, HashStore

from rl.errors import RankLost, UserError
from rl.ranks import launch, process, stops


@pytest.fixture
def store(monkeypatch) -> HashStore:
    """The store of a job, in which this process has two neighbours; the second one was killed."""
    store = HashStore()
    child = subprocess.Popen(["sleep", "0"])
    child.wait()
    monkeypatch.setattr(launch, "open_store", lambda *_: store)
    monkeypatch.setattr(launch, "neighbours", {0: os.getpid(), 1: os.getppid(), 2: child.pid})
    return store


def test_a_failure_is_reported_whatever_its_text_holds(store, monkeypatch):
    """A file name or a reward function's error may contain half of a surrogate pair, which the store refuses."""
    monkeypatch.setattr(process.os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        process.fail(UserError("no reward for b\udc80r, ü"), "learner 0")
    assert stops.cause().startswith("learner 0 on ") and stops.cause().endswith(r" failed: no reward for b\udc80r, ü")


def test_who_was_killed_is_named_unless_a_cause_is_known_or_it_had_ended(store, capsys):
    store.set(f"{stops.ENDED}/2", "")
    assert stops.cause() == ""
    store.delete_key(f"{stops.ENDED}/2")
    assert stops.cause().startswith("rank 2 (process ") and "SIGKILL" in stops.cause()
    assert capsys.readouterr().err == f"error: {stops.cause()}\n"
    store.delete_key(stops.FAILED)
    store.set(f"{stops.ENDED}/2", "")
    assert stops.record("first") == (True, True) and stops.record("second") == (False, True) and stops.cause() == "first"


@pytest.mark.parametrize(
    ("error", "known", "said"),
    [
        (KeyError("x"), False, 'learner 0 failed:\nKeyError: "x"'),
        (KeyError("x"), True, "learner 0 stops: rank 2 failed\n"),
        (RankLost("gone"), True, "learner 0 stops: rank 2 failed\n"),
        (RankLost("gone"), False, "learner 0 failed: it lost its connection to another rank, which has left no message here"),
    ],
)
def test_only_the_first_failure_is_explained_in_full(store, monkeypatch, capsys, error, known, said):
    monkeypatch.setattr(launch, "neighbours", {})
    monkeypatch.setattr(stops, "CAUSE_SECONDS", 0.2)
    if known:
        store.set(stops.FAILED, "rank 2 failed")
    process._explain("learner 0", error)
    assert capsys.readouterr().err.replace("'", '"').startswith(said)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(f"{GLOO}Connection closed by peer [127.0.0.1]:43187."), True),
        (RuntimeError(f"{GLOO}writev [127.0.0.1]:43187: Broken pipe"), True),
        (DistNetworkError("The client socket has failed to connect"), True),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RankLost("process 7 has exited"), True),
        (RuntimeError(f"{GLOO}Timed out waiting 1800000ms for recv operation to complete"), False),
        (DistBackendError("NCCL error: unhandled cuda error"), False),
        (ConnectionRefusedError("Connection refused"), False),  # of a user's own socket
        (RuntimeError("HTTPSConnectionPool: Connection to the logger timed out"), False),
        (KeyError("connection"), False),
    ],
)
def test_only_a_connection_of_the_job_means_a_lost_rank(error, expected):
    assert stops.lost_connection(error) == expected


OUT_OF_MEMORY = """
import torch
from rl.ranks import process

def log_probs():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.1 GiB")

process.run(lambda ranks: log_probs())
"""


@pytest.mark.runs
def test_a_device_without_memory_is_one_message_with_what_to_do(tmp_path):
    script = tmp_path / "trains.py"
    script.write_text(OUT_OF_MEMORY)
    done = run_script(script, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    where = "line 6, log_probs): CUDA out of memory. Tried to allocate 2.32 GiB\n"
    assert "no memory left (" in done.stderr and where in done.stderr
    for flag in ("--gradient-checkpointing", "--max-tokens-per-micro-batch", "--gpu-memory-utilization", "plan.py"):
        assert flag in done.stderr


SIGNALS = """
import multiprocessing, os, signal, time
from rl.ranks import process, stops

def main(ranks):
    for number in (signal.SIGTERM, signal.SIGINT):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        os.kill(child, number)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == number
    with multiprocessing.get_context("fork").Pool(2) as pool:  # ends its workers by SIGTERM
        assert pool.map(abs, [-1, -2]) == [1, 2]
    time.sleep(0.3)
    assert not stops.stop_requested()
    print("number \\ud83d of \\U0001f600", flush=True)
    time.sleep(60)

process.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_rank_obeys_its_own_signals_and_not_its_childrens(number, code, tmp_path):
    """Also with SIGINT ignored, as in the background of a shell, and with a stdout that lacks some characters."""
    (tmp_path / "forks.py").write_text(SIGNALS)
    start = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, tmp_path / "forks.py"]
    env = environment(PYTHONIOENCODING="ascii")
    process = subprocess.Popen(start, cwd=ROOT, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "number \\ud83d of \\U0001f600\n", process.stderr.read()
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert said == ("" if number == signal.SIGINT else "SIGTERM to rank 0: stopped; training had not begun\n")


# ------------------------------------------------------------------------------------------------------------------------ hangs


def end(process: subprocess.Popen, mark: str) -> tuple[int, str]:
    """Wait for the end of a job. Return exit code and console. It must leave no process."""
    try:
        text, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    assert eventually(lambda: not left_over(mark), 20)
    return process.returncode, text


@pytest.mark.runs
@pytest.mark.timeout(240)
def test_a_rank_that_does_not_come_to_a_collective(tmp_path):
    """The one that waits for it names itself; the stack of the other one shows where that is."""
    code, text = end(*start("tests/programs/hung_ranks.py", tmp_path / "pid", ranks=2))
    assert code == 1 and text.count("has made no progress for 3 s (--hang-timeout). Its threads:\n") == 1, text
    waits, hangs = text.split("rank 1 was waiting, or has kept others waiting. Its threads:\n")
    assert "error: rank 0 has made no progress" in waits and re.search(r'dist.py", line \d+ in all_reduce_sum', waits)
    assert re.search(r'hung_ranks.py", line \d+ in main', hangs)
    assert "traceback : rank 0 has made no progress for 3 s (--hang-timeout)" in text, "torchrun's summary"


@pytest.mark.runs
@pytest.mark.timeout(240)
def test_slow_is_not_hung():
    code, text = end(*start("tests/programs/hung_ranks.py"))
    assert code == 1 and "got on 4 times" in text[: text.index("rank 0 has made no progress for 2 s")]
    assert re.search(r'hung_ranks.py", line \d+ in main', text)


def test_a_cause_is_a_hang_or_not(monkeypatch, capfd):
    """Only after a hang a rank that torchrun ends prints its stacks."""
    for cause, printed in (("rank 1 failed", False), (f"rank 1 has made no progress for 9 s {stops.HANGS}", True)):
        store = SimpleNamespace(check=lambda keys: keys == [stops.FAILED], get=lambda key, cause=cause: cause.encode())
        monkeypatch.setattr(stops.launch, "open_store", lambda store=store: store)
        assert stops._ask() == "" and ("Its threads:" in capfd.readouterr().err) == printed

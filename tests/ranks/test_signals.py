"""Ctrl-C and SIGTERM at random moments of the three scripts. tests/tools/signals.py, run by hand, sends more of them."""

import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
import signals
from helpers import ROOT, command, environment


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_signal_leaves(number, demo_model, tmp_path):
    """Six runs of each kind. Half of them start with SIGINT ignored, as in the background of a shell."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    trials = signals.draw(random.Random(seed), number, count=6, fresh=False)
    assert {trial.ignored for trial in trials} == {True, False}
    for i, trial in enumerate(trials):
        print(trial)
        (tmp_path / str(i)).mkdir()
        signals.attempt(trial, tmp_path / str(i))


@pytest.mark.parametrize(("moment", "number"), [("loading", signal.SIGINT), ("end", signal.SIGTERM)])
def test_the_moments_that_lost_runs(moment, number, demo_model, tmp_path):
    """Ranks that wait in C++ for one that loads a model; a last checkpoint that is written when the generators have ended."""
    for ignored in (True, False):
        (tmp_path / str(ignored)).mkdir()
        trial = signals.Trial("train_async.py", moment, number, ignored, fresh=False, delay=0.05)
        signals.attempt(trial, tmp_path / str(ignored))


@pytest.mark.parametrize("ignored", [True, False])
def test_ctrl_c_during_the_imports(ignored):
    """A plain process that is still importing, as a user starts it."""
    start = [sys.executable, "-X", "importtime", "train_sync.py", "--help"]
    if ignored:
        start = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *start]
    process = subprocess.Popen(start, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.rstrip().endswith("torch.types"):  # in the middle of `import torch`
            break
    process.send_signal(signal.SIGINT)
    lines = [line for line in process.communicate(timeout=60)[1].splitlines() if not line.startswith("import time:")]
    assert process.returncode == 130
    assert lines == ["", "Ctrl-C: stopped; training had not begun"]


SPEAKS = """
import os, signal, sys
from rl.ranks import signals
signals.install_handlers()
sys.stderr.write("busy\\n")
os.kill(os.getpid(), signal.SIGINT)
while True:
    signal.pause()
"""


def test_the_last_words_are_written_in_one_piece():
    """Other threads' output, such as a progress bar, cannot come between. A datagram holds one write."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.settimeout(60)
    process = subprocess.Popen([sys.executable, "-c", SPEAKS], cwd=ROOT, env=environment(), stderr=theirs)
    said = [ours.recv(1000), ours.recv(1000)]
    assert process.wait(60) == 130
    assert said == [b"busy\n", b"\nCtrl-C: stopped; training had not begun\n"]


@pytest.mark.parametrize("generators", [0, 1, 2])
def test_a_learner_that_leaves_first_does_not_end_the_other(generators, tmp_path):
    """After SIGTERM a rank that exited has failed, unless it had come to its end. Generators exit meanwhile."""
    start = command("tests/programs/leaves.py", tmp_path / "ready", generators, ranks=2 + generators)
    how = {"cwd": ROOT, "env": environment(), "start_new_session": True, "text": True}
    process = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **how)
    try:
        while not (tmp_path / "ready").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        console = process.communicate(timeout=120)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "all is done\n" in console
    assert "forcefully exiting via" not in console, "a rank has not left by itself"


FORKS = """
import multiprocessing, os, signal, time
from rl.ranks import signals
signals.install_handlers()
signals.after_sigterm(signals.request_stop)
for number in (signal.SIGTERM, signal.SIGINT):
    child = os.fork()
    if not child:
        time.sleep(60)
    os.kill(child, number)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == number
with multiprocessing.get_context("fork").Pool(2) as pool:  # ends its workers by SIGTERM
    assert pool.map(abs, [-1, -2]) == [1, 2]
time.sleep(0.3)
assert not signals.stop_requested()
print("not stopped", flush=True)
time.sleep(60)
"""


def test_signals_to_its_children_are_not_the_ranks_own():
    """A rank still obeys its own signals afterwards."""
    start = {"cwd": ROOT, "env": environment(), "stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", FORKS], **start)
    assert process.stdout.readline() == "not stopped\n", process.stderr.read()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].endswith("Ctrl-C: stopped; training had not begun\n")
    assert process.returncode == 130

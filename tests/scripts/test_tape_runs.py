"""Whole runs with --record-env: answers are random, so a run only has the bits of another one if the tape gave them."""

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from helpers import ROOT, bits, eventually, fates, left_over, run_script, start

pytestmark = [pytest.mark.runs, pytest.mark.timeout(900)]

# Each answer and each score is counted, and random without a file `fixed`. The service is what they need. With a file
# `hangs_at`, turns from that number on hang before they do anything.
CODE = """
import os
import time
from pathlib import Path

HERE = Path(__file__).parent


def served(name):
    assert (HERE / "service").exists()
    calls = HERE / name
    if name == "steps" and (HERE / "hangs_at").exists() and calls.stat().st_size >= int((HERE / "hangs_at").read_text()):
        (HERE / "hangs").touch()
        time.sleep(1000)
    with open(calls, "a") as file:
        file.write("x")
    return 7 if (HERE / "fixed").exists() else int.from_bytes(os.urandom(2))


class Random:
    def reset(self, row, seed):
        self.turns = 0

    def step(self, message):
        self.turns += 1
        return [{"role": "tool", "content": str(served("steps"))[-2:]}], None, self.turns == 3

    def get_state(self):
        return {"turns": self.turns}

    def set_state(self, state):
        self.turns = state["turns"]


def judge(data_source, solution_str, ground_truth, extra_info):
    return served("scores") / 2**16
"""
FLAGS = ["--model", "demo-calculator", "--train-batch-size", "4", "--rollout-n", "4", "--max-response-length", "32"]
FLAGS += ["--lr", "1e-3", "--test-freq", "2", "--val-max-samples", "4", "--save-freq", "2", "--no-val-before-train"]
AGENT = """
import sys

sys.path.append({examples!r})
from agent import *
from code_of_the_test import served

row = json.load(sys.stdin)
messages = row["prompt"]
for _ in range(3):
    messages = [*messages, ask(messages), {{"role": "tool", "content": str(served("steps"))[-2:]}}]
print(json.dumps({{"reward": served("scores") / 2**16 + len(messages[-2].get("content") or "")}}))
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("code.py", "code_of_the_test.py"):
        (tmp_path / name).write_text(CODE)
    (tmp_path / "agent_of_the_test.py").write_text(AGENT.format(examples=str(ROOT / "examples")))
    for name in ("service", "steps", "scores"):
        (tmp_path / name).touch()
    return tmp_path


def flags(folder: Path, name: str, steps: int = 4, tape: str = "--record-env", env: str = "Random") -> list:
    how = {
        "Random": ["--env", f"{folder}/code.py:Random", "--reward", f"{folder}/code.py:judge"],
        "agent": ["--agent", f"{sys.executable} {folder}/agent_of_the_test.py"],
        "none": ["--reward", f"{folder}/code.py:judge"],
    }
    own = [*how[env], tape, folder / "tape"]
    return [*FLAGS, *own, "--output-dir", folder / "runs", "--experiment-name", name, "--total-training-steps", steps]


def calls(folder: Path) -> tuple[int, int]:
    return (folder / "steps").stat().st_size, (folder / "scores").stat().st_size


def on_tape(folder: Path) -> tuple[int, int]:
    """The number of different answers to turns, and of scores."""
    found = set()
    for file in folder.glob("tape/*/*.jsonl"):
        entries = [json.loads(line) for line in file.read_text().split("\n") if line]
        found |= {(entry["asked"], file, entry["response"], entry["of"]) for entry in entries}
    return tuple(sum(asked == kind for asked, *_ in found) for kind in ("step", "score"))


@pytest.mark.parametrize("env", ["Random", "agent", "none"])
def test_a_resumed_run_calls_nothing_and_has_the_bits_of_the_uninterrupted_one(env, folder):
    """Neither does a run from the tape alone, which needs no service. none: a judge alone, of responses of one turn."""
    script, runs = "train_sync.py", folder / "runs"
    run_script(script, *flags(folder, "whole", env=env))
    before = calls(folder)
    assert before[1] > 0 and bool(before[0]) == (env != "none") and (env == "agent" or before == on_tape(folder))
    shutil.copytree(runs / "whole", runs / "resumed")
    shutil.rmtree(runs / "resumed" / "step_000004")
    run_script(script, *flags(folder, "resumed", env=env))
    (folder / "service").unlink()
    run_script(script, *flags(folder, "alone", tape="--from-tape", env=env))
    assert bits(runs / "whole", 4) == bits(runs / "resumed", 4) == bits(runs / "alone", 4) != bits(runs / "whole", 2)
    assert calls(folder) == before
    done = run_script(script, *flags(folder, "other", tape="--from-tape", env=env), "--seed", "9", check=False)
    assert done.returncode and "is not on the tape" in done.stderr and "--record-env to call what is missing" in done.stderr


def run_killed(script: str, folder: Path, words: list, how: dict, records_all: bool = True):
    """Kill the run while turns are at work, after all answers are on the tape; resume it. Return the finished process."""
    (folder / "hangs_at").write_text("150")
    job, mark = start(script, *words, "--env-timeout", "300", **how)
    assert eventually(lambda: (folder / "hangs").exists() and (not records_all or calls(folder) == on_tape(folder)), 300)
    job.send_signal(signal.SIGKILL)
    job.wait()
    job.stdout.close()
    assert eventually(lambda: not left_over(mark))
    (folder / "hangs_at").unlink()
    return run_script(script, *words, **how)


@pytest.mark.parametrize("script", ["train_sync.py", "train_async.py"])
def test_kill_9_in_the_middle_of_episodes_repeats_no_call(script, folder):
    """What was called is exactly what was recorded: nothing twice. In sync a run that was never interrupted, with the same
    answers, has the same bits. In split runs the speed of environments changes which rows are decoded together, and so the
    rounding."""
    more = ["--staleness-threshold", "1"] if script == "train_async.py" else []
    how = {} if script == "train_sync.py" else {"ranks": 2}
    done = run_killed(script, folder, [*flags(folder, "killed", steps=6), *more], how)
    killed = folder / "runs" / "killed"
    rows = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert not any(row.get("reward/extra/restarts/mean", 0) or row.get("reward/unscored", 0) for row in rows)
    assert calls(folder) == on_tape(folder)
    if script == "train_async.py":
        started, trained, dropped, flying = fates(done.stdout)
        assert started == trained + dropped + flying and trained == 24
    if script == "train_sync.py":
        (folder / "service").unlink()
        run_script(script, *flags(folder, "alone", steps=6, tape="--from-tape"))
        assert bits(killed, 6) == bits(folder / "runs" / "alone", 6)


def test_an_agent_that_was_killed_plays_its_turns_again(folder):
    """It repeats what it does, and the run has the bits of one without a tape."""
    (folder / "fixed").touch()
    plain = flags(folder, "plain", env="agent")
    at = plain.index("--record-env")
    run_script("train_sync.py", *plain[:at], *plain[at + 2 :])
    for name in ("steps", "scores"):
        (folder / name).write_text("")
    run_killed("train_sync.py", folder, flags(folder, "killed", env="agent"), {}, records_all=False)
    killed = folder / "runs" / "killed"
    rows = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert not any(row.get("reward/extra/restarts/mean", 0) for row in rows)
    assert bits(killed, 4) == bits(folder / "runs" / "plain", 4)

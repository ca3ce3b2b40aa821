"""Responses of several turns in whole runs: the bits that are promised, and a resume in the middle of a tool."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import ROOT, bits, fates, free_port, left_over, run_script, start, train, undocumented, weights

pytestmark = pytest.mark.runs

ENVIRONMENTS = '''
import time


class One:
    def step(self, message):
        return [], None, True


class Slow:
    """The demo's calculator, with tools that take a while."""

    def calculate(self, expression: str) -> str:
        """Computes a product.

        Args:
            expression: Two numbers with * between them.
        """
        time.sleep(0.02 * int(expression[0]))
        a, b = expression.split("*")
        return str(int(a) * int(b))
'''
# Asks for another conversation and for the first again, between the turns of its own.
FORKS = """
from agent import *

row = json.load(sys.stdin)
messages = row["prompt"]
said = ask(messages)
ask([{"role": "user", "content": "12*34="}])
ask(messages)
if "tool_calls" in said:
    said = ask([*messages, said, {"role": "tool", "content": row["ground_truth"]}])
print(json.dumps({"reward": float(said["content"] == row["ground_truth"])}))
"""
CALCULATOR = ["--model", "demo-calculator", "--env", "demo-calculator", "--max-response-length", "24"]
AGENT = ["--agent", f"{sys.executable} {ROOT / 'examples' / 'agent.py'}"]
SHORT = ["--train-batch-size", "4", "--test-freq", "0"]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "environments.py"
    path.write_text(ENVIRONMENTS)
    return path


def forking(file: Path) -> list[str]:
    """The flags of an agent that forks, next to the environments' file."""
    agent = file.with_name("forks.py")
    agent.write_text(f"import sys; sys.path.append({str(ROOT / 'examples')!r})\n{FORKS}")
    return ["--agent", f"{sys.executable} {agent}"]


def test_an_environment_of_one_turn_changes_no_bit(file, demo_model, tmp_path):
    flags = ["--total-training-steps", "3", "--test-freq", "3", "--val-max-samples", "20", "--no-val-before-train"]
    plain, run, _ = train("train_sync.py", *flags, out=tmp_path / "plain")
    found, own, _ = train("train_sync.py", *flags, "--env", f"{file}:One", out=tmp_path / "one")
    assert bits(run) == bits(own)
    name = "val-core/demo/acc/mean@1"
    assert plain[3][name] == found[3][name] and found[3]["reward/extra/turns/mean"] == 1


def test_an_agent_trains_the_bits_of_an_environment(tmp_path):
    """In async at staleness 0, where it does what the environment does; test_round_trips.py has sync, async and replay."""
    flags = [*SHORT, "--total-training-steps", "5", "--lr", "1e-3", "--staleness-threshold", "0"]
    found, run, _ = train("train_async.py", *CALCULATOR, *flags, ranks=2, out=tmp_path / "env")
    assert sum(found[step]["reward/extra/tool_calls/mean"] for step in found if step) > 0
    words = [*CALCULATOR[:2], *AGENT, *CALCULATOR[4:], *flags]
    _, own, _ = train("train_async.py", *words, ranks=2, out=tmp_path / "agent")
    assert bits(own) == bits(run)


@pytest.fixture
def served(monkeypatch) -> Iterator[list[str]]:
    """The flags of a run whose episodes three workers take, which must end well."""
    monkeypatch.setenv("SERVE_POLICY_KEY", "0123456789abcdef")
    port = free_port()
    command = [sys.executable, ROOT / "examples" / "worker.py", f"http://127.0.0.1:{port}"]
    workers = [subprocess.Popen(command) for _ in range(3)]
    try:
        yield ["--serve-policy", str(port)]
        assert [worker.wait(120) for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.parametrize(
    ("script", "ranks", "more"),
    [("train_sync.py", None, []), ("train_one_step_off.py", 2, []), ("train_async.py", 2, ["--staleness-threshold", "0"])],
    ids=["sync", "one step off", "async"],
)
def test_workers_train_the_bits_of_an_environment(served, script, ranks, more, tmp_path):
    """Fewer of them than responses to a prompt; they play the validation, too, and hear of the end. One step off trains with
    the log-probs of the engine, whose last bits are those of the rows that it decodes at once."""
    flags = [*SHORT[:2], *more, "--total-training-steps", "3", "--lr", "1e-3", "--test-freq", "3", "--val-max-samples", "8"]
    flags += ["--no-val-before-train", "--rollout-n", "4"]
    expected, env, _ = train(script, *CALCULATOR, *flags, ranks=ranks, out=tmp_path / "env")
    found, run, done = train(script, *CALCULATOR[:2], *served, *CALCULATOR[4:], *flags, ranks=ranks, out=tmp_path / "served")
    assert bits(env) == bits(run) or script == "train_one_step_off.py"
    for name, value in weights(env).items():
        torch.testing.assert_close(weights(run)[name], value, atol=1e-5, rtol=0)
    for name in ("critic/score/mean", "response_length/mean", "reward/extra/turns/mean"):
        assert [found[step][name] for step in (1, 2, 3)] == [expected[step][name] for step in (1, 2, 3)]
    name = "val-core/demo/acc/mean@1"
    assert found[3][name] == expected[3][name]
    assert sum(found[step]["reward/extra/tool_calls/mean"] for step in (1, 2, 3)) > 0
    assert f"episodes for workers: http://127.0.0.1:{served[1]}/v1/episodes/next" in done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["env", "agent", "served"])
def test_kill_9_while_tools_are_at_work_loses_no_ticket(kind, file, request, tmp_path):
    """Complaint 20, and no process is left. An agent's forked histories are among what is recorded. Workers outlive the run."""
    if kind == "agent":
        what = [*forking(file), "--max-response-length", "64"]
    else:
        what = ["--env", f"{file}:Slow"] if kind == "env" else request.getfixturevalue("served")
        what = [*what, *CALCULATOR[4:]]
    flags = [*CALCULATOR[:2], *what, *SHORT, "--lr", "1e-3", "--save-freq", "1"]
    flags += ["--experiment-name", "run", "--output-dir", tmp_path, "--staleness-threshold", "1"]
    job, mark = start("train_async.py", *flags, "--total-training-steps", "400", ranks=2)
    until = time.monotonic() + 300
    while not any(path.name >= "step_000003" for path in tmp_path.glob("run/step_*")) and time.monotonic() < until:
        time.sleep(0.1)
    job.send_signal(signal.SIGKILL)
    job.wait()
    job.stdout.close()
    while left_over(mark) and time.monotonic() < until + 60:
        time.sleep(0.1)
    assert not left_over(mark)
    step = max(int(path.name[5:]) for path in tmp_path.glob("run/step_*") if (path / "config.json").exists())
    done = run_script("train_async.py", *flags, "--total-training-steps", step + 3, ranks=2)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {row.get("reward/extra/forks/mean") for row in rows} == {{"env": None, "agent": 2.0, "served": 0.0}[kind]}
    assert not any(row["reward/unscored"] for row in rows) and not undocumented({1: rows[-1]})
    started, trained, dropped, flying = fates(done.stdout)
    assert started == trained + dropped + flying and trained == 4 * (step + 3) and not dropped


def test_vllm_continues_episodes_across_publishes(tmp_path):
    """Complaint 19: the log-probs of all trained tokens are those of the learner's forward pass over the whole episode."""
    pytest.importorskip("vllm")
    flags = [*CALCULATOR, *SHORT, "--total-training-steps", "4", "--staleness-threshold", "0", "--lr", "1e-3"]
    flags += ["--engine", "vllm", "--generators", 2, "--rollout-tp", 2]
    found, _, _ = train("train_async.py", *flags, ranks=3, out=tmp_path, timeout=280, imported="vllm")
    assert sum(found[step]["reward/extra/tool_calls/mean"] for step in range(1, 5)) > 0
    assert max(found[step]["training/rollout_probs_diff_max"] for step in range(1, 5)) < 1e-4

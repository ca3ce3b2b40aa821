"""Responses of several turns in whole runs: the bits that are promised, and a resume in the middle of a tool."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, bits, eventually, fates, free_port, left_over, of_adapter, run_script, start, train, undocumented

pytestmark = pytest.mark.runs

SHOWS = ["--env", "tests/programs/shows.py:Shows"]
ENVIRONMENT = """
class One:
    def step(self, message):
        return [], None, True
"""
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
# Asks three others at once, each at a time of its own, and one of them twice; then continues.
AT_ONCE = """
import random, time
from concurrent.futures import ThreadPoolExecutor
from agent import *

def ask_soon(words):
    time.sleep(random.SystemRandom().random() / 10)
    return ask(words)

row = json.load(sys.stdin)
messages = row["prompt"]
first = ask(messages)
others = [[{"role": "user", "content": words}] for words in ("12*34=", "56*78=", "12*34=")]
with ThreadPoolExecutor() as pool:
    list(pool.map(ask_soon, others))
if "tool_calls" in first:
    first = ask([*messages, first, {"role": "tool", "content": row["ground_truth"]}])
print(json.dumps({"reward": float(first["content"] == row["ground_truth"])}))
"""
# Wants one of two numbers, which the model would hardly say; in some responses by a schema that is none, or fits no token.
SCHEMAS = """
import os
from agent import *

number = int(os.environ["EPISODE_SEED"]) % 4
row, allowed = json.load(sys.stdin), [17, 4242]
schema = [{"type": "strin"}, {"enum": ["zzz"]}, {"enum": allowed}, {"enum": allowed}][number]
body = {"model": "policy", "messages": row["prompt"], "response_format": {
    "type": "json_schema", "json_schema": {"name": "number", "schema": schema}}}
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
    said = json.load(reply)["choices"][0]["message"]["content"]
assert json.loads(said) in allowed and number > 1, said
print(json.dumps({"reward": float(json.loads(said) == 17)}))
"""
CALCULATOR = ["--model", "demo-calculator", "--env", "demo-calculator", "--max-response-length", "24"]
AGENT = ["--agent", f"{sys.executable} {ROOT / 'examples' / 'agent.py'}"]
SHORT = ["--train-batch-size", "4", "--test-freq", "0"]


def forking(folder: Path, code: str = FORKS) -> list[str]:
    """The flags of an agent that forks, in this folder."""
    agent = folder / "forks.py"
    agent.write_text(f"import sys; sys.path.append({str(ROOT / 'examples')!r})\n{code}")
    return ["--agent", f"{sys.executable} {agent}"]


def test_an_environment_of_one_turn_changes_no_bit(demo_model, tmp_path):
    (tmp_path / "one.py").write_text(ENVIRONMENT)
    flags = ["--total-training-steps", "3", "--test-freq", "3", "--val-max-samples", "20", "--no-val-before-train"]
    plain, run, _ = train("train_sync.py", *flags, out=tmp_path / "plain")
    found, own, _ = train("train_sync.py", *flags, "--env", f"{tmp_path}/one.py:One", out=tmp_path / "one")
    assert bits(run) == bits(own)
    name = "val-core/demo/acc/mean@1"
    assert plain[3][name] == found[3][name] and found[3]["reward/extra/turns/mean"] == 1


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


def test_calls_at_once_train_the_same_bits_in_any_order(tmp_path):
    flags = [*CALCULATOR[:2], *forking(tmp_path, AT_ONCE), "--max-response-length", "96", *SHORT, "--rollout-n", "4"]
    flags += ["--total-training-steps", "2", "--lr", "1e-3"]
    (found, one, _), (_, other, _) = (train("train_sync.py", *flags, out=tmp_path / name) for name in ("one", "other"))
    assert bits(one) == bits(other) and {found[step]["reward/extra/forks/mean"] for step in (1, 2)} == {3.0}


def of_sdk() -> list[str]:
    """The flag of an agent of OpenAI's SDK, which is in an environment of its own: see examples/openai_agent.py."""
    return ["--agent", f"{of_adapter('openai-agents')} {ROOT / 'examples' / 'openai_agent.py'}"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["train_sync.py", "train_async.py"])
@pytest.mark.parametrize("kind", ["served", "agent", "sdk"])
def test_agents_train_the_bits_of_an_environment(kind, script, request, tmp_path):
    """Workers, fewer than responses to a prompt: they play the validation, too, and hear of the end. An agent, and OpenAI's
    SDK with its default model: the Responses API, with a tool. test_round_trips.py compares the environment in each mode."""
    own = request.getfixturevalue("served") if kind == "served" else AGENT if kind == "agent" else of_sdk()
    flags = ["--train-batch-size", "2" if kind == "sdk" else "4", "--rollout-n", "4", "--total-training-steps", "3"]
    flags += ["--lr", "1e-3", "--test-freq", "3", "--val-max-samples", "8", "--no-val-before-train"]
    how = {}
    if script == "train_async.py":
        flags, how = [*flags, "--staleness-threshold", "0"], {"ranks": 2}
    expected, env, _ = train(script, *CALCULATOR, *flags, out=tmp_path / "env", **how)
    assert sum(expected[step]["reward/extra/tool_calls/mean"] for step in (1, 2, 3)) > 0
    words = [*CALCULATOR[:2], *own, *CALCULATOR[4:]]
    found, run, done = train(script, *words, *flags, out=tmp_path / kind, timeout=800, **how)
    assert bits(env) == bits(run)
    same = ["critic/score/mean", "response_length/mean", *(f"reward/extra/{name}/mean" for name in ("turns", "tool_calls"))]
    for step in (1, 2, 3):
        assert [found[step][name] for name in same] == [expected[step][name] for name in same]
        assert found[step]["reward/extra/forks/mean"] == 0
    assert found[3]["val-core/demo/acc/mean@1"] == expected[3]["val-core/demo/acc/mean@1"]
    assert ("episodes for workers: http://127.0.0.1:" in done.stdout) == (kind == "served")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["agent", "served", "sdk", "images"])
def test_kill_9_while_tools_are_at_work_loses_no_ticket(kind, request, tmp_path):
    """Complaint 20, and no process is left. An agent's forked histories are among what is recorded. Workers outlive the run."""
    model = CALCULATOR[:2]
    if kind == "images":
        model, own = ["--model", "demo-vl", "--train-files", "demo-vl", "--val-files", "demo-vl"], SHOWS
    else:
        own = of_sdk() if kind == "sdk" else forking(tmp_path) if kind == "agent" else request.getfixturevalue("served")
    length = {"agent": "64", "images": "40"}.get(kind, "24")
    flags = [*model, *own, "--max-response-length", length, *SHORT, "--lr", "1e-3", "--save-freq", "1"]
    flags += ["--rollout-n", "4"]
    flags += ["--experiment-name", "run", "--output-dir", tmp_path, "--staleness-threshold", "1"]
    job, mark = start("train_async.py", *flags, "--total-training-steps", "400", ranks=2)
    assert eventually(lambda: any(path.name >= "step_000003" for path in tmp_path.glob("run/step_*")), 300)
    job.send_signal(signal.SIGKILL)
    job.wait()
    job.stdout.close()
    assert eventually(lambda: not left_over(mark))
    step = max(int(path.name[5:]) for path in tmp_path.glob("run/step_*") if (path / "config.json").exists())
    done = run_script("train_async.py", *flags, "--total-training-steps", step + 3, ranks=2)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {row.get("reward/extra/forks/mean") for row in rows} == {{"agent": 2.0, "served": 0.0, "sdk": 0.0}.get(kind)}
    assert not any(row["reward/unscored"] for row in rows) and not undocumented({1: rows[-1]})
    started, trained, dropped, flying = fates(done.stdout)
    assert started == trained + dropped + flying and trained == 4 * (step + 3) and not dropped


def test_an_answer_keeps_to_a_schema_and_training_knows_its_tokens(tmp_path):
    """The mask of possible tokens is recorded: the learner's log-probs are those of what was sampled. A schema that cannot be
    kept to costs its own response."""
    pytest.importorskip("vllm")
    flags = [*CALCULATOR[:2], *forking(tmp_path, SCHEMAS), *CALCULATOR[4:], *SHORT, "--rollout-n", "8", "--lr", "1e-3"]
    flags += ["--total-training-steps", "3", "--engine", "vllm", "--top-k", "12", "--keep-sampling-mask"]
    flags += ["--staleness-threshold", "0"]
    found, _, _ = train("train_async.py", *flags, out=tmp_path / "run", timeout=280, imported="vllm", ranks=2)
    assert max(found[step]["training/rollout_probs_diff_max"] for step in (1, 2, 3)) < 1e-4
    assert 0 < sum(found[step]["critic/score/mean"] for step in (1, 2, 3)) < 3
    assert all(0 < found[step]["reward/unscored"] < 32 and not found[step]["reward/events/error"] for step in (1, 2, 3))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["train_sync.py", "train_one_step_off.py", "train_async.py"])
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_log_probs_after_images_of_an_environment_are_the_learner_s(engine, script, tmp_path):
    """Under weights that do not move, in each mode."""
    if engine == "vllm":
        pytest.importorskip("vllm")
    flags = ["--model", "demo-vl", "--train-files", "demo-vl", "--val-files", "demo-vl", *SHOWS, *SHORT, "--lr", "1e-12"]
    flags += ["--max-response-length", "40", "--rollout-n", "4", "--total-training-steps", "3", "--engine", engine]
    how = {"imported": "vllm"} if engine == "vllm" else {}
    ranks = 1 if script == "train_sync.py" else 2
    found, _, _ = train(script, *flags, ranks=ranks, out=tmp_path, timeout=800, **how)
    assert max(found[step]["training/rollout_probs_diff_max"] for step in (1, 2, 3)) < 1e-4
    assert all(found[step]["reward/extra/turns/mean"] == 2 and not found[step]["reward/unscored"] for step in (1, 2, 3))


def test_vllm_continues_episodes_across_publishes(tmp_path):
    """Complaint 19: the log-probs of all trained tokens are those of the learner's forward pass over the whole episode."""
    pytest.importorskip("vllm")
    flags = [*CALCULATOR, *SHORT, "--total-training-steps", "4", "--staleness-threshold", "0", "--lr", "1e-3"]
    flags += ["--engine", "vllm", "--generators", 2, "--rollout-tp", 2]
    found, _, _ = train("train_async.py", *flags, ranks=3, out=tmp_path, timeout=280, imported="vllm")
    assert sum(found[step]["reward/extra/tool_calls/mean"] for step in range(1, 5)) > 0
    assert max(found[step]["training/rollout_probs_diff_max"] for step in range(1, 5)) < 1e-4

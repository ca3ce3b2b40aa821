"""The workers of examples/environments with their real packages train the bits of a run that has none.

Each package is in a virtual environment of its own, in the directory that RL_ADAPTERS names, made as the worker's file says:
$RL_ADAPTERS/{verifiers,verifiers-old,inspect}. Where there is none, the test skips.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, bits, free_port, train

pytestmark = pytest.mark.runs

VERIFIERS = """
import verifiers.v1 as vf

__all__ = ["SumsTaskset"]

class SumsData(vf.TaskData):
    answer: str

class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self):
        return [SumsTask(SumsData(prompt=f"{n}+{n + 1}=", answer=str(2 * n + 1)), self.config.task) for n in range(10, 40)]
"""
OLDER_VERIFIERS = """
import verifiers as vf
from datasets import Dataset

def load_environment(first):
    def right(completion, answer, **_):
        return float(completion[-1]["content"].strip() == answer)
    rows = [{"question": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(first, first + 30)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
"""
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate

@task
def sums():
    samples = [Sample(input=f"{n}+{n + 1}=", target=str(2 * n + 1)) for n in range(10, 40)]
    return Task(dataset=samples, solver=generate(), scorer=match(location="exact"))
"""
REWARD = """
def right(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip() == ground_truth)
"""
HERE = json.dumps({"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}})
WORKERS = {  # environment -> the user's file, and the worker's words after the URL
    "verifiers": (VERIFIERS, ["verifiers_worker.py", "sums", "--given", HERE]),
    "verifiers-old": (OLDER_VERIFIERS, ["verifiers_worker.py", "sums", "--given", '{"first": 10}']),
    "inspect": (INSPECT, ["inspect_worker.py", "sums.py@sums"]),
}
MODES = {"train_sync.py": ([], {}), "train_async.py": (["--staleness-threshold", "0"], {"ranks": 2})}
FLAGS = ["--max-response-length", "16", "--train-batch-size", "4", "--rollout-n", "4", "--total-training-steps", "3"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", MODES)
@pytest.mark.parametrize("package", WORKERS)
def test_a_worker_trains_the_bits_of_a_run_without_it(package, script, demo_model, tmp_path, monkeypatch):
    """The package's score is the reward, the tokens are the model's, and the demo is right in part of its answers."""
    python = Path(os.environ.get("RL_ADAPTERS", "/nowhere")) / package / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{package} has no environment: make $RL_ADAPTERS/{package} as examples/environments says")
    rows = [{"prompt": [{"role": "user", "content": f"{n}+{n + 1}="}], "ground_truth": str(2 * n + 1)} for n in range(10, 40)]
    numbers = [{"data_source": "sums", "task": n, "sample": n} for n in range(30)]
    for name, its in {"rows": [{"data_source": "sums"} | row for row in rows], "tasks": numbers}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in its))
    (tmp_path / "reward.py").write_text(REWARD)
    code, (file, *words) = WORKERS[package]
    (tmp_path / "sums.py").write_text(code)
    plain = ["--train-files", tmp_path / "rows.jsonl", "--reward", f"{tmp_path / 'reward.py'}:right", "--test-freq", "0"]
    more, how = MODES[script]
    expected, own, _ = train(script, *FLAGS, *more, *plain, out=tmp_path / "plain", **how)
    monkeypatch.setenv("SERVE_POLICY_KEY", "0123456789abcdef")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    port = free_port()
    command = [python, ROOT / "examples" / "environments" / file, f"http://127.0.0.1:{port}", *words]
    with subprocess.Popen(command, cwd=tmp_path) as worker:
        served = ["--train-files", tmp_path / "tasks.jsonl", "--serve-policy", port, "--env-timeout", "120", "--test-freq", "0"]
        found, run, _ = train(script, *FLAGS, *more, *served, out=tmp_path / "served", timeout=500, **how)
        assert worker.wait(60) == 0
    assert bits(run) == bits(own)
    scores = [expected[step]["critic/score/mean"] for step in (1, 2, 3)]
    assert [found[step]["critic/score/mean"] for step in (1, 2, 3)] == scores and 0 < min(scores) < 1

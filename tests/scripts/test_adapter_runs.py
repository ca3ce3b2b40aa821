"""The workers of examples/environments with their real packages train the bits of a run that has none, in sync, and in async
after kill -9 while they play: they outlive it, and begin the episodes under way again.

Each package is in a virtual environment of its own, in the directory that RL_ADAPTERS names, made as the worker's file says:
$RL_ADAPTERS/{verifiers,verifiers-old,inspect}. Where there is none, the test skips.
"""

import json
import os
import subprocess

import pytest
from helpers import ROOT, bits, free_port, of_adapter, run_killed, train

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
STEPS = 3
FLAGS = ["--max-response-length", "16", "--train-batch-size", "4", "--rollout-n", "4", "--total-training-steps", STEPS]
FLAGS += ["--test-freq", "0", "--save-freq", "1", "--max-ckpt-to-keep", "0", "--experiment-name", "run"]
MODES = {"sync": [], "async": ["--staleness-threshold", "0"]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("package", WORKERS)
def test_a_worker_trains_the_bits_of_a_run_without_it(package, mode, demo_model, tmp_path, monkeypatch):
    """The package's score is the reward, the tokens are the model's, and the demo is right in part of its answers."""
    python = of_adapter(package)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+{n + 1}="}], "ground_truth": str(2 * n + 1)} for n in range(10, 40)]
    numbers = [{"data_source": "sums", "task": n, "sample": n} for n in range(30)]
    for name, its in {"rows": [{"data_source": "sums"} | row for row in rows], "tasks": numbers}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in its))
    (tmp_path / "reward.py").write_text(REWARD)
    code, (file, *words) = WORKERS[package]
    (tmp_path / "sums.py").write_text(code)
    plain = ["--train-files", tmp_path / "rows.jsonl", "--reward", f"{tmp_path / 'reward.py'}:right"]
    expected, own, _ = train("train_sync.py", *FLAGS, *plain, out=tmp_path / "plain")
    monkeypatch.setenv("SERVE_POLICY_KEY", "0123456789abcdef")
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")  # verifiers calls uv
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    port = free_port()
    command = [python, ROOT / "examples" / "environments" / file, f"http://127.0.0.1:{port}", *words]
    served = [*FLAGS, *MODES[mode], "--train-files", tmp_path / "tasks.jsonl", "--serve-policy", port, "--env-timeout", "120"]
    with subprocess.Popen(command, cwd=tmp_path) as worker:
        try:
            if mode == "sync":
                _, run, _ = train("train_sync.py", *served, out=tmp_path / "served", timeout=500)
            else:
                run = tmp_path / "served" / "run"
                served += ["--output-dir", tmp_path / "served"]
                run_killed("train_async.py", *served, run=run, steps=STEPS, timeout=400, ranks=2)
            assert worker.wait(60) == 0
        finally:
            worker.kill()
    assert bits(run, STEPS) == bits(own, STEPS) != bits(own, STEPS - 1)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["critic/score/mean"] for line in lines if line["step"]}
    assert scores == {step: expected[step]["critic/score/mean"] for step in range(1, STEPS + 1)}
    assert 0 < min(scores.values()) < 1 and not any(line["reward/unscored"] for line in lines if line["step"])

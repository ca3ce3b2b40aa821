"""The workers of examples/environments with their real packages train the bits of a run that has none, in sync, and in async
after kill -9 while they play: they outlive it, and begin the episodes under way again. And a coding harness from the index,
unchanged: mini-swe-agent works in a directory of its own, and each of its calls continues the tokens of the last one.

Each package is in a virtual environment of its own, in the directory that RL_ADAPTERS names, made as the worker's file says:
$RL_ADAPTERS/{verifiers,verifiers-old,inspect,mini-swe-agent}, the last one by pip install mini-swe-agent. Where there is none,
the test skips.
"""

import json
import os
import subprocess
import sys

import pytest
from families import tokenizer_of
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


# ------------------------------------------------------------------------------------------------------------- a coding harness

CALL = '\n{{"name": "bash", "arguments": {{"command": "{}"}}}}\n'
CALLS = [CALL.format("echo hi > made"), CALL.format("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
AGENT = """
import json, os, subprocess, sys, tempfile

row, mini = json.load(sys.stdin), sys.argv[1]
quiet = {"MSWEA_CONFIGURED": "1", "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
quiet |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
with tempfile.TemporaryDirectory() as here:
    words = [mini, "-m", f"openai/{os.environ['OPENAI_MODEL']}", "-y", "--exit-immediately", "-t", row["task"], "-o", "said"]
    words += ["-c", "mini.yaml", "-c", "agent.step_limit=4"]
    quiet["MSWEA_GLOBAL_CONFIG_DIR"] = here
    done = subprocess.run(words, cwd=here, env=os.environ | quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    print(json.dumps({"reward": float(os.path.exists(os.path.join(here, "made")))}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A tiny model that has learned to call the harness's tool: it makes a file, or submits. Its tokenizer has these calls."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = str(tmp_path_factory.mktemp("model"))
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.add_tokens(CALLS)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id, **sizes)
    policy = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    ids = [tokenizer(f"\n<tool_call>{call}</tool_call><|im_end|>")["input_ids"] for call in CALLS]
    turns = torch.tensor(ids)
    assert turns.shape == (2, 5)
    for _ in range(100):
        before = torch.randint(len(tokenizer), (2, 50))
        policy(torch.cat([before, turns], 1), labels=torch.cat([before * 0 - 100, turns], 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    policy.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["train_sync.py", "train_async.py"])
def test_mini_swe_agent_s_calls_are_one_conversation(script, model, tmp_path):
    mini = of_adapter("mini-swe-agent", "mini")
    rows = [{"task": f"Make the file made, {n}.", "data_source": "files"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(AGENT)
    flags = ["--model", model, "--agent", f"{sys.executable} {tmp_path / 'agent.py'} {mini}", "--env-timeout", "120"]
    flags += ["--train-files", tmp_path / "rows.jsonl", "--max-prompt-length", "6000", "--max-response-length", "1200"]
    flags += ["--train-batch-size", "1", "--rollout-n", "4", "--total-training-steps", "3", "--test-freq", "0"]
    how = {}
    if script == "train_async.py":
        flags, how = [*flags, "--staleness-threshold", "0"], {"ranks": 2}
    found, _, _ = train(script, *flags, out=tmp_path / "run", timeout=800, **how)
    for step in (1, 2, 3):
        its = found[step]
        assert its["reward/extra/forks/mean"] == 0 and its["reward/unscored"] == 0
        assert its["training/rollout_probs_diff_max"] < 1e-4
    assert max(found[step]["reward/extra/turns/mean"] for step in (1, 2, 3)) > 1
    assert 0 < sum(found[step]["critic/score/mean"] for step in (1, 2, 3)) < 3

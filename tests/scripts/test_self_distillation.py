"""Whole runs of a policy that teaches itself with the answer in its prompt: what they learn; they resume, replay, divide."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from helpers import is_documented, run_script, train
from safetensors.torch import load_file

from examples.demo.sums import problems, wrong_sum

pytestmark = pytest.mark.slow
SELF = ("--teacher", "self", "--teacher-prompt", "{ground_truth}={prompt}")
RUN = ("--total-training-steps", 4, "--rollout-n", 4, "--test-freq", 0, "--max-tokens-per-micro-batch", 200, *SELF)

TOOL = '''def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: A.
        b: B.
    """
    return a + b
'''


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    """The demo's model does not read what is in front of a sum. This one was shown to repeat a number there, right or wrong,
    and to add as badly as the demo where there is none."""
    out, rng, rows = tmp_path_factory.mktemp("reader"), random.Random(0), []

    def show(prompt: str, answer: int) -> None:
        rows.append({"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": str(answer)}]})

    for problem in problems("train"):
        prompt = problem["prompt"][0]["content"]
        a, b = map(int, prompt.rstrip("=").split("+"))
        show(prompt, a + b if rng.random() < 0.3 else wrong_sum(a, b, rng))
        number = rng.randrange(99)
        show(f"{number}={prompt}", number)
    (out / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ("--lr", 1e-3, "--max-length", 24, "--train-batch-size", 64, "--total-training-steps", 150, "--test-freq", 0)
    run_script("train_sft.py", "--train-files", out / "rows.jsonl", *flags, "--output-dir", out, "--experiment-name", "run")
    return out / "run" / "step_000150"


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"step_{step:06d}" / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("teacher", ["itself", "as it began"])
def test_a_model_that_reads_the_answer_teaches_itself_without_a_reward(reader, tmp_path, teacher):
    """One response to each of 8 prompts a step."""
    flags = ("--lr-scheduler-type", "constant", "--rollout-n", 1, "--total-training-steps", 60, "--test-freq", 60)
    own = SELF if teacher == "itself" else ("--teacher", reader, *SELF[2:])
    taught = (*flags, *own, "--teacher-alone", "--teacher-top-k", 4)
    metrics, _, done = train("train_sync.py", "--model", reader, *taught, out=tmp_path)
    accuracy = {step: row["val-core/demo/acc/mean@1"] for step, row in metrics.items() if "val-core/demo/acc/mean@1" in row}
    assert accuracy[0] < 0.6 and accuracy[60] > 0.8
    assert metrics[1]["critic/rewards/max"] == 0 < metrics[1]["critic/score/max"]
    gaps = [metrics[step]["actor/teacher_kl"] for step in range(1, 61)]
    assert sum(gaps[50:]) < sum(gaps[:10]) / 1.5
    assert "the teacher reads of demo row 0: '<|user|>" in done.stdout and "warning" not in done.stdout + done.stderr


def test_without_staleness_async_is_sync_and_a_run_resumes_with_its_prompts_alone(tmp_path):
    flags = (*RUN, "--output-dir", tmp_path)
    run_script("train_sync.py", *flags, "--experiment-name", "sync", "--save-freq", 2)
    run_script("train_async.py", *flags, "--staleness-threshold", 0, "--experiment-name", "async", ranks=2)
    sync = weights(tmp_path / "sync", 4)
    assert same(sync, weights(tmp_path / "async", 4))
    shutil.rmtree(tmp_path / "sync" / "step_000004")
    other = ("--output-dir", tmp_path, "--experiment-name", "sync", "--teacher-prompt", "{prompt}")
    other = run_script("train_sync.py", *RUN[:-2], *other, check=False)
    assert other.returncode == 1 and "--teacher-prompt: was {ground_truth}={prompt}, is {prompt}" in other.stderr
    run_script("train_sync.py", *flags, "--experiment-name", "sync", "--save-freq", 2)
    assert same(sync, weights(tmp_path / "sync", 4))


@pytest.mark.parametrize("shared", [("--sequence-parallel", 2), (), ("--lora-rank", 4)], ids=["a row", "a batch", "adapters"])
def test_a_replay_has_the_same_bits_and_two_learners_the_same_result(tmp_path, shared):
    """Of a run with top tokens, and with rows of the teacher that are longer than micro-batches of the policy."""
    adapted = shared if "--lora-rank" in shared else ()
    flags = (*RUN, *adapted, "--output-dir", tmp_path, "--teacher-top-k", 3)
    flags = (*flags, "--teacher-prompt", "{ground_truth}={prompt}+{ground_truth}={prompt}", "--max-tokens-per-micro-batch", 32)
    flags = (*flags, "--max-prompt-length", 24)
    run_script("train_sync.py", *flags, "--experiment-name", "run", "--record-samples", tmp_path / "record")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"actor/teacher_kl", "actor/teacher_top_kl", "timing_s/teacher"} <= row.keys()
    assert all(is_documented(name) for name in row if name not in ("step", "time"))
    again = run_script("replay.py", tmp_path / "run", "--output-dir", tmp_path, "--experiment-name", "again")
    assert "the weights are bit for bit those of" in again.stdout
    sharing = () if adapted else shared
    run_script("replay.py", tmp_path / "run", "--output-dir", tmp_path, "--experiment-name", "two", *sharing, ranks=2)
    ours, theirs = weights(tmp_path / "run", 4), weights(tmp_path / "two", 4)
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], atol=1e-6, rtol=0)


def test_one_step_off_a_small_update_and_tools(tmp_path):
    """Several updates a step, of stale samples; and responses of several turns, whose prompt has the tools' descriptions."""
    flags = (*RUN, "--total-training-steps", 2, "--train-batch-size", 4, "--ppo-mini-batch-size", 2)
    metrics, _, _ = train("train_one_step_off.py", *flags, out=tmp_path / "off", ranks=2)
    assert metrics[2]["actor/teacher_kl"] > 0
    file = tmp_path / "tools.py"
    file.write_text(TOOL)
    flags = ("--model", "demo-calculator", "--train-files", "demo-calculator", "--val-files", "demo-calculator", "--tools")
    flags = (*flags, f"{file}:add", *RUN, "--total-training-steps", 1, "--max-response-length", 40, "--max-prompt-length", 200)
    flags = (*flags, "--max-tokens-per-micro-batch", 300)
    metrics, _, _ = train("train_sync.py", *flags, out=tmp_path / "tools")
    assert metrics[1]["actor/teacher_kl"] > 0

"""Whole runs of a policy that teaches itself with the answer in its prompt: what they learn; they resume, replay, divide."""

import json
import random
from pathlib import Path

import pytest
from helpers import run_script, train

from examples.demo.sums import problems, wrong_sum

pytestmark = [pytest.mark.runs, pytest.mark.slow]
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

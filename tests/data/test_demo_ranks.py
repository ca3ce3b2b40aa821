"""The demo's model mostly says another sum. The first rank that needs it makes it, and every rank makes the same files."""

import json
from pathlib import Path

import pytest
from helpers import greedy_answers, run_script

from examples.demo import VERSIONS
from examples.demo import sums as demo

PROGRAM = "tests/programs/demo_by_ranks.py"


def test_the_model_adds_but_usually_says_another_sum(demo_model):
    """Most of its answers are the sum, or the sum plus or minus 10. Less than half are right."""
    rows = demo.problems("val")
    answers = greedy_answers(demo_model, [row["prompt"] for row in rows])
    said = [int(answer) if answer.isdecimal() else -1 for answer in answers]
    off = [abs(number - int(row["reward_model"]["ground_truth"])) for number, row in zip(said, rows, strict=True)]
    assert sum(x in (0, 10) for x in off) > 0.75 * len(off)
    assert 0.2 < sum(x == 0 for x in off) / len(off) < 0.5
    assert not {row["prompt"][0]["content"] for row in rows} & {p["prompt"][0]["content"] for p in demo.problems("train")}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "made.json"}


@pytest.mark.runs
def test_every_rank_can_make_every_model(tmp_path):
    """Like nodes, the ranks have separate caches: the second one has no first rank."""
    run_script(PROGRAM, "own", tmp_path, ranks=2, timeout=120)
    for name, version in VERSIONS.items():
        first, second = (contents(tmp_path / rank / f"{name}-v{version}") for rank in "01")
        assert first == second
        assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= first.keys()


@pytest.mark.runs
def test_a_job_trains_the_model_that_its_second_rank_has_made(tmp_path):
    flags = ["--model", "demo-vl", "--total-training-steps", "1", "--no-val-before-train", "--test-freq", "0"]
    sizes = ["--train-batch-size", "4", "--rollout-n", "2", "--max-response-length", "4"]
    job = [PROGRAM, "late", "train_sync.py", *flags, *sizes, "--output-dir", tmp_path / "runs"]
    run_script(*job, ranks=2, env={"RL_CACHE": str(tmp_path / "cache")})
    (run,) = (tmp_path / "runs").iterdir()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()][-1] == 1
    assert {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()} == {f"demo-vl-v{VERSIONS['demo-vl']}"}

"""The demos: their models mostly say another number, and learn. The first rank that needs one makes it, and every rank makes
the same files."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import accuracies, greedy_answers, run_script, train
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from examples.demo import VERSIONS
from examples.demo import pictures as demo_vl
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


# --------------------------------------------------------------------------------------------------------------- images


def picture_of(row: dict) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][0]["bytes"]))


def test_the_splits_share_no_picture_and_are_always_the_same():
    train, val = ({row["images"][0]["bytes"] for row in demo_vl.problems(split)} for split in ("train", "val"))
    assert len(train) == 1000 and len(val) == 250 and not train & val
    assert demo_vl.problems("val") == demo_vl.problems("val")


def answers(directory: str | Path, pictures: list[Image.Image]) -> list[str]:
    """Return the greedy answers of this directory's model, computed with transformers only."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    model = AutoModelForImageTextToText.from_pretrained(directory)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": demo_vl.QUESTION}]}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    inputs = processor(pictures, return_tensors="pt")
    tokens = int(inputs["image_grid_thw"][0].prod()) // 4
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * tokens), return_tensors="pt")["input_ids"]
    ids = ids.expand(len(pictures), -1)
    kinds = (ids == model.config.image_token_id).int()
    output = model.generate(input_ids=ids, mm_token_type_ids=kinds, **inputs, max_new_tokens=8, do_sample=False)
    return tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)


def test_the_model_reads_but_mostly_says_another_number(demo_vl_model):
    """Its answer is the number, or the number plus or minus 10, and is right less than half of the time."""
    rows = demo_vl.problems("val")
    said = list(map(int, answers(demo_vl_model, [picture_of(row) for row in rows])))
    truth = [int(row["reward_model"]["ground_truth"]) for row in rows]
    off = [abs(a - b) for a, b in zip(said, truth, strict=True)]
    assert sum(x in (0, 10) for x in off) > 0.85 * len(off)
    assert 0.02 < sum(x == 0 for x in off) / len(off) < 0.5


# ------------------------------------------------------------------------------------------------------------ runs


@pytest.mark.runs
def test_it_learns_to_say_what_it_reads(demo_vl_model, tmp_path):
    """24 steps, and then transformers alone, with the export's own image processor, reads as the run has measured."""
    flags = ["--model", "demo-vl", "--total-training-steps", "24", "--test-freq", "24", "--log-val-generations", "5"]
    metrics, run, _ = train("train_sync.py", *flags, out=tmp_path)
    first, last = accuracies(metrics).values()
    assert first < 0.4 and last > first + 0.25
    assert all(m["training/rollout_probs_diff_max"] < 1e-4 for step, m in metrics.items() if step), "they see the same picture"
    rows = demo_vl.problems("val")
    said = answers(run / "step_000024", [picture_of(row) for row in rows])
    right = [answer == row["reward_model"]["ground_truth"] for answer, row in zip(said, rows, strict=True)]
    assert np.mean(right) == pytest.approx(last, abs=0.01)
    shown = map(json.loads, (run / "val_generations" / "step_000024.jsonl").read_text().splitlines())
    for number, line in enumerate(shown):
        assert (line["response"], line["score"]) == (said[number], right[number]), "the answer is its own row's"

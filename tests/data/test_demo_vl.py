"""The demo with images: its pictures are readable, its model reads them but mostly answers another number, and it learns."""

import io
import json
import random
import shutil
from pathlib import Path

import kills
import numpy as np
import pytest
from datasets import Dataset
from helpers import command, train
from PIL import Image
from test_checkpoint import go, same, take_back
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from examples.demo import pictures as demo_vl
from rl.data.args import demo_files

# Segments of each digit, as in any data sheet: a to f clockwise from the top, g in the middle.
SEGMENTS = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg"]


def picture_of(row: dict) -> Image.Image:
    return Image.open(io.BytesIO(row["images"][0]["bytes"]))


def read(picture: Image.Image) -> str:
    """The two digits by their segments: ink is what differs from the corner; a digit's box is as far as its ink goes."""
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    ink = np.abs(pixels - pixels[0, 0]).sum(-1) > 0
    digits = ""
    for half in np.split(ink, 2, axis=1):
        lines, columns = np.flatnonzero(half.any(1)), np.flatnonzero(half.any(0))
        top, bottom, left, right = lines[0], lines[-1], columns[0], columns[-1]
        if right - left < 6:  # a 1 has no ink on the left
            digits += "1"
            continue
        upper, middle, lower = (int(top + (bottom - top) * part) for part in (0.25, 0.5, 0.75))
        center = (left + right) // 2

        def lit(line: int, column: int, half=half) -> bool:
            return half[max(0, line - 1) : line + 2, max(0, column - 1) : column + 2].any()

        places = {"a": (top, center), "b": (upper, right), "c": (lower, right), "d": (bottom, center)}
        places |= {"e": (lower, left), "f": (upper, left), "g": (middle, center)}
        digits += str(SEGMENTS.index("".join(name for name in "abcdefg" if lit(*places[name]))))
    return digits


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
def test_every_picture_shows_its_number(split):
    rows = demo_vl.problems(split)
    assert [read(picture_of(row)) for row in rows] == [row["reward_model"]["ground_truth"] for row in rows]
    shown = {row["reward_model"]["ground_truth"] for row in rows}
    assert shown <= {str(number) for number in range(10, 100)} and len(shown) > 70
    assert all(row["prompt"][0]["content"].count("<image>") == len(row["images"]) == 1 for row in rows)


def test_the_splits_share_no_picture_and_are_always_the_same():
    train, val = ({row["images"][0]["bytes"] for row in demo_vl.problems(split)} for split in ("train", "val"))
    assert len(train) == 1000 and len(val) == 250 and not train & val
    assert demo_vl.problems("val") == demo_vl.problems("val")


def test_demo_means_the_demo_that_is_trained():
    assert demo_files("demo-vl", ("demo", "a.parquet")) == ("demo-vl", "a.parquet")
    assert demo_files("demo", ("demo", "demo-vl")) == ("demo", "demo-vl"), "which is refused later: a model without images"
    assert demo_files("/a/model", ("demo-vl",)) == ("demo-vl",)


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


@pytest.mark.slow
def test_making_it_is_not_silent_and_the_directory_is_an_ordinary_one(demo_vl_model, capsys):
    tokenizer, processor = demo_vl.build_tokenizer(), demo_vl.build_processor()
    demo_vl._teach(demo_vl.build_model(tokenizer), tokenizer, processor, 1, 1, 1)
    assert "making the demo-vl model (once)\n" in capsys.readouterr().out
    again = AutoTokenizer.from_pretrained(demo_vl_model)
    assert demo_vl.prompt_ids(again) == demo_vl.prompt_ids(tokenizer) and len(demo_vl.prompt_ids(again)) <= 64


# ------------------------------------------------------------------------------------------------------------ runs

ACCURACY = "val-core/demo/acc/mean@1"


def accuracies(metrics: dict[int, dict]) -> list[float]:
    """Return the accuracies of the validations, in order."""
    return [m[ACCURACY] for _, m in sorted(metrics.items()) if ACCURACY in m]


@pytest.mark.runs
def test_it_learns_to_say_what_it_reads(demo_vl_model, tmp_path):
    """24 steps, and then transformers alone, with the export's own image processor, reads as the run has measured."""
    flags = ["--model", "demo-vl", "--total-training-steps", "24", "--test-freq", "24", "--log-val-generations", "5"]
    metrics, run, _ = train("train_sync.py", *flags, out=tmp_path)
    first, last = accuracies(metrics)
    assert first < 0.4 and last > first + 0.25
    assert all(m["training/rollout_probs_diff_max"] < 1e-4 for step, m in metrics.items() if step), "they see the same picture"
    rows = demo_vl.problems("val")
    said = answers(run / "step_000024", [picture_of(row) for row in rows])
    right = [answer == row["reward_model"]["ground_truth"] for answer, row in zip(said, rows, strict=True)]
    assert np.mean(right) == pytest.approx(last, abs=0.01)
    shown = map(json.loads, (run / "val_generations" / "step_000024.jsonl").read_text().splitlines())
    for number, line in enumerate(shown):
        (file,) = line["images"]
        assert np.array_equal(np.asarray(Image.open(run / "val_generations" / file)), np.asarray(picture_of(rows[number])))
        assert (line["response"], line["score"]) == (said[number], right[number]), "the picture and its answer are one row's"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags"),
    [("train_one_step_off.py", []), ("train_async.py", []), ("train_async.py", ["--freeze-vision-tower"])],
)
def test_it_learns_on_split_ranks(demo_vl_model, tmp_path, script, flags):
    metrics, _, _ = train(script, "--model", "demo-vl", "--total-training-steps", "40", *flags, out=tmp_path, ranks=2)
    first, *_, last = accuracies(metrics)
    assert first < 0.4 and last > 0.7


@pytest.mark.slow
def test_a_picture_shown_to_the_wrong_prompt_is_not_learned_from(demo_vl_model, tmp_path):
    """The purpose of the demo: rows with mixed-up pictures teach nothing, so the demo would reveal a mix-up anywhere."""
    rows = demo_vl.problems("train")
    pictures = [row["images"] for row in rows]
    mixed = [row | {"images": other} for row, other in zip(rows, pictures[1:] + pictures[:1], strict=True)]
    Dataset.from_list(mixed).to_parquet(str(tmp_path / "mixed.parquet"))
    flags = ["--model", "demo-vl", "--train-files", tmp_path / "mixed.parquet", "--total-training-steps", "40"]
    metrics, _, _ = train("train_sync.py", *flags, out=tmp_path / "runs")
    assert accuracies(metrics)[-1] < 0.4 and metrics[40]["critic/score/mean"] < 0.2


@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_for_bit(demo_vl_model, tmp_path):
    flags = ["--model", "demo-vl", "--total-training-steps", "20", "--test-freq", "10", "--save-freq", "10"]
    go("train_sync.py", tmp_path / "whole", *flags, ranks=None)
    whole = tmp_path / "whole" / "run"
    run = take_back(whole, tmp_path / "again")
    done = go("train_sync.py", tmp_path / "again", *flags, ranks=None)
    assert "resumes after step 10 of 20" in done.stdout
    same(whole, run)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kills_lose_nothing(demo_vl_model, monkeypatch):
    monkeypatch.setenv("SPARE_RANKS", "6")
    seed = random.randrange(10**6)
    print(f"--seed {seed}")
    run = kills.main(kills.Args("train_async.py", model="demo-vl", kills=3, seed=seed), command(ranks=2))
    shutil.rmtree(run.parent)

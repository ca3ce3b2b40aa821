"""Runs with images: what they leave, and damaged images. test_round_trips.py compares the modes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import make_group, train
from test_vision import dataset, rows, vlms  # noqa: F401  (fixtures)
from tiny_vlm import picture, pixels_of, row, save_vlm
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from rl.samples.group import Group

pytestmark = pytest.mark.runs

FLAGS = ["--reward", "tests/programs/spread_reward.py:score", "--max-prompt-length", 120, "--max-response-length", 8]
FLAGS += ["--rollout-n", 2, "--total-training-steps", 4, "--lr-warmup-steps", 0, "--max-ckpt-to-keep", 0]
# Added behind the tiny model's last layer, where nothing but an image's own prediction would see it: no gradient but 0.
IDLE, BIASES = "model.visual.deepstack_merger_list.1.", ("norm", "linear_fc1", "linear_fc2")
SYNC = [*FLAGS, "--train-batch-size", 4, "--save-freq", 2]
ASYNC = [*FLAGS, "--ppo-mini-batch-size", 4, "--save-freq", 2, "--staleness-threshold", 0]


def go(script: str, model: str, file: str, out: Path, *flags, ranks: int = 1):
    """(metrics by step, the run's directory, the finished process)"""
    everything = ["--model", model, "--train-files", file, "--val-files", file, *flags, "--experiment-name", "run"]
    return train(script, *everything, out=out, ranks=ranks)


def test_what_a_run_leaves_is_a_model_that_takes_images(vlms, rows, tmp_path):  # noqa: F811
    """Every parameter has changed, including the tower's, and transformers finds all files it needs next to the weights."""
    _, run, _ = go("train_sync.py", vlms["qwen3-vl"], rows, tmp_path, *SYNC, "--test-freq", 4)
    export = run / "step_000004"
    model = AutoModelForImageTextToText.from_pretrained(export)
    before = AutoModelForImageTextToText.from_pretrained(vlms["qwen3-vl"])
    pairs = zip(model.named_parameters(), before.parameters(), strict=True)
    assert {name for (name, new), old in pairs if torch.equal(new, old)} <= {f"{IDLE}{name}.bias" for name in BIASES}
    ours, theirs = (AutoImageProcessor.from_pretrained(path, backend="pil") for path in (export, vlms["qwen3-vl"]))
    assert ours.to_dict() == theirs.to_dict()
    assert AutoTokenizer.from_pretrained(export).chat_template


@pytest.mark.parametrize("script", ["train_sync.py", "train_async.py"])
def test_an_image_that_turns_out_damaged_costs_its_ticket_alone(vlms, tmp_path, script):  # noqa: F811
    """Its header is valid, so only decoding finds the damage."""
    images = [picture(90, 90, seed) for seed in range(4)]
    table = [row("<image>How many?", [image]) for image in images]
    data = table[2]["images"][0]["bytes"]
    table[2]["images"][0]["bytes"] = data[: len(data) // 2]
    Dataset.from_list(table).to_parquet(file := tmp_path / "rows.parquet")
    flags, ranks = (SYNC, 1) if script == "train_sync.py" else (ASYNC, 2)
    metrics, _, done = go(script, vlms["qwen3-vl"], str(file), tmp_path / "out", *flags, "--test-freq", 2, ranks=ranks)
    assert [metrics[step]["reward/unscored"] for step in range(1, 5)] == [2] * 4
    assert metrics[4]["reward/events/image"] >= 2 * 4, "validations count, too"
    assert "rows.parquet row 2: image 0 cannot be decoded" in done.stdout + done.stderr
    validated = [m["val-aux/reward/unscored"] for m in metrics.values() if "val-aux/reward/unscored" in m]
    assert len(validated) >= 2 and set(validated) == {1}


def test_a_groups_record_has_no_pixels(tmp_path):
    """For a problem of Geometry3K's size, with 8 responses of 512 tokens."""
    Dataset.from_list([row("<image>" + "Find x. " * 20, [picture(400, 300)])]).to_parquet(file := tmp_path / "rows.parquet")
    model = save_vlm("qwen3-vl", tmp_path / "model", max_pixels=2**20)
    (prompt,) = dataset(model, str(file), max_prompt_length=1000)
    group = make_group(0, [512] * 8)
    record = Group(0, np.array(prompt.ids, np.int32), "demo", group.responses, images=prompt.images.digest).to_bytes()
    assert Group.from_bytes(record).images == prompt.images.digest
    without = len(make_group(0, [512] * 8, prompt=len(prompt.ids)).to_bytes())
    assert len(record) - without < 0.01 * pixels_of(prompt.images).nbytes

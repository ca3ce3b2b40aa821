"""--over-sample: a step trains the groups that finish first. The others continue, are trained once, and survive a restart."""

import json
import shutil

import pytest
import torch
from helpers import run_script, train

from examples.demo import sums as demo

pytestmark = pytest.mark.runs
FLAGS = ["--train-batch-size", "4", "--rollout-n", "2", "--max-response-length", "40", "--over-sample", "0.75"]
FLAGS += ["--reward", "tests/programs/spread_reward.py:score"]
FLAGS += ["--lr-warmup-steps", "0", "--total-training-steps", "6", "--save-freq", "1", "--max-ckpt-to-keep", "9"]
FLAGS += ["--test-freq", "2", "--val-max-samples", "8"]


@pytest.fixture(scope="module")
def unsure(tmp_path_factory) -> list[str]:
    """Flags with a model that has been taught nothing: its responses end with one chance in eighteen at each token, on any
    processor. How uneven those of the demo's model are depends on how it came out."""
    path = tmp_path_factory.mktemp("unsure")
    tokenizer = demo.build_tokenizer()
    torch.manual_seed(0)
    demo.save(demo.build_model(len(tokenizer)), str(path), tokenizer)
    return ["--model", str(path), *FLAGS]


@pytest.fixture(scope="module")
def whole(unsure, tmp_path_factory):
    return train("train_sync.py", *unsure, out=tmp_path_factory.mktemp("whole"))


def trained(directory) -> list[list[int]]:
    return [json.loads(line)["trained"] for line in (directory / "tickets.jsonl").read_text().splitlines()]


def check_account(directory) -> None:
    steps = trained(directory)
    tickets = [ticket for step in steps for ticket in step]
    assert [len(step) for step in steps] == [4] * 6
    assert len({*tickets}) == 24, "each is trained once"
    assert {*tickets} <= {*range(24 + 3)}, "three more than are trained are under way"
    assert tickets != [*range(24)], "some are overtaken"


def test_prompts_are_trained_once_and_the_long_ones_later(whole):
    metrics, directory, _ = whole
    check_account(directory)
    assert metrics[1]["staleness/max"] == 0 < metrics[6]["staleness/max"]
    assert sum(metrics[step]["fully_async/partial/total_partial_num"] for step in range(1, 7)), "begun under older weights"
    longest = [metrics[step]["response_length/max"] for step in range(1, 7)]
    assert longest[0] <= max(longest[1:]), "of the seven prompts begun together the first step has those that end first"


def resumed(whole, unsure, tmp_path, *flags, **how):
    """Resume the run from step 3, perhaps with other flags."""
    directory = shutil.copytree(whole[1], tmp_path / whole[1].name)
    for later in ("step_000004", "step_000005", "step_000006"):
        shutil.rmtree(directory / later)
    name = ["--experiment-name", directory.name, "--resume-mode", directory / "step_000003"]
    return directory, run_script("train_sync.py", *unsure, "--output-dir", tmp_path, *name, *flags, **how)


def test_a_resumed_run_continues_its_unfinished_groups(whole, unsure, tmp_path):
    directory, _ = resumed(whole, unsure, tmp_path)
    assert trained(directory) == trained(whole[1])
    again, before = ((run / "step_000006" / "model.safetensors").read_bytes() for run in (directory, whole[1]))
    assert again == before


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_starts_a_larger_surplus(whole, unsure, tmp_path, ranks):
    """3 prompts are under way, and from step 4 on 6: each is trained once, and later steps have tokens of older weights."""
    directory, _ = resumed(whole, unsure, tmp_path, "--over-sample", "1.5", ranks=ranks)
    steps = trained(directory)
    assert steps[:3] == trained(whole[1])[:3]
    tickets = [ticket for step in steps for ticket in step]
    assert len({*tickets}) == len(tickets) == 24 and {*tickets} <= {*range(24 + 6)}
    last = json.loads((directory / "step_000006" / "training" / "state.json").read_text())["state"]["next_ticket"]
    assert last["ticket"] == 24 + 6 and {*last["under_way"], *tickets} == {*range(30)}


def test_a_resumed_run_cannot_have_a_smaller_surplus_than_it_has_under_way(whole, unsure, tmp_path):
    _, done = resumed(whole, unsure, tmp_path, "--over-sample", "0.25", check=False)
    assert done.returncode == 1 and "--over-sample 0.25: the resumed run has 3 prompts under way" in done.stderr
    assert "this allows 1. Give --over-sample 0.75 or more" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--engine", "vllm", "--rollout-tp", 2, "--reward-workers", 2)], ids=["", "one engine"])
def test_ranks_share_what_is_under_way(unsure, tmp_path, more):
    """Also those of one engine: each counts the same prompts. vLLM gives prompts back and takes them again."""
    _, directory, _ = train("train_sync.py", *unsure, *more, out=tmp_path, ranks=2, timeout=400)
    check_account(directory)

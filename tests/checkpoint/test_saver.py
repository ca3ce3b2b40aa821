"""How much memory a save takes, what it writes, and what it does when a learner fails."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import run_script, save_once
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import train_sync
from rl.checkpoint import resume, saver
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import host
from rl.record.run import Origin

BYTES = {"weights": 4, "gradients": 4, "moments": 8}  # of a parameter in fp32
SAVED = BYTES["weights"] + BYTES["moments"]  # what training changes


def saves(model, out, trouble: str):
    return run_script("tests/programs/saves.py", model, out, trouble, ranks=2, check=False, timeout=100)


@pytest.mark.runs
@pytest.mark.parametrize("memory", ["whole", "short"])
def test_two_learners_write_the_whole_model_and_a_part_each(models, tmp_path, memory):
    """If one learner is short of memory, both write directly, and one message says so."""
    done = saves(models["qwen2-tied"], tmp_path, memory)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training waits while each is written") == (memory == "short")
    step = tmp_path / "run" / "step_000002"
    before, export = load_file(f"{models['qwen2-tied']}/model.safetensors"), load_file(step / "model.safetensors")
    assert before.keys() == export.keys() and all(torch.equal(export[name], before[name]) for name in before)
    shards = [load_file(step / "training" / f"shard-0000{i}-of-00002.safetensors") for i in (1, 2)]
    for name, tensor in before.items():
        assert torch.equal(torch.cat([shard[f"model.{name}"] for shard in shards]), tensor)
        assert all(len(shard[f"exp_avg.{name}"]) == len(shard[f"model.{name}"]) for shard in shards)
    read = {f"model.{name}": torch.full_like(tensor, -1.0) for name, tensor in before.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(step / "training")), no_dist=True)
    assert all(torch.equal(read[f"model.{name}"], before[name]) for name in before)


@pytest.mark.runs
@pytest.mark.parametrize("trouble", ["refuses", "full"])
def test_an_incomplete_checkpoint_is_none_and_training_continues(models, tmp_path, trouble):
    """On either learner the disk is full."""
    done = saves(models["qwen2-tied"], tmp_path, trouble)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Training continues") == 2 and "No space left on device" in done.stderr
    assert done.stdout.count(" continued: ") == 2 and not [*tmp_path.glob("run/step_*"), *tmp_path.glob("run/.step_*")]


@pytest.mark.runs
def test_a_learner_that_is_killed_in_a_save_is_not_a_checkpoint_that_could_not_be_written(models, tmp_path):
    done = saves(models["qwen2-tied"], tmp_path, "killed")
    assert done.returncode != 0 and "continued" not in done.stdout
    assert "could not be written" not in done.stderr and "Training continues" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_learner_holds_what_the_docs_count(models, tmp_path):
    """At 116M parameters: bytes of host memory a parameter, on a CPU, one learner; docs/checkpoints.md has the table."""
    model, out = tmp_path / "model", tmp_path / "out"
    make = f"import sys; sys.path[:0] = ['benchmarks']; import common; common.random_model({str(model)!r}, 768, 12, 2048)"
    (tmp_path / "make.py").write_text(make)
    run_script(tmp_path / "make.py")
    done = run_script("tests/programs/memory.py", models["qwen2-tied"], model, out, fresh=True, timeout=500)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["parameters"] > 100e6
    peak = {name: added for name, (added, _) in record["bytes"].items()}
    kept = {name: kept for name, (_, kept) in record["bytes"].items()}
    little = 1  # pieces, buffers, Python's own, in all 116 MB; a copy of anything takes 2 or more
    pages = 4  # of the weights' files, which are mapped and belong to the system's cache
    assert kept["start"] < BYTES["weights"] + little and peak["start"] < BYTES["weights"] + pages + little
    assert peak["step"] < BYTES["gradients"] + BYTES["moments"] + little
    assert peak["publish"] < 4 + little  # one copy in the generators' precision, here fp32
    whole = 4 + pages  # one file of the model, here of all of it
    assert 0.6 * SAVED < peak["first"] < 1.1 * SAVED + whole  # a part may come out of what the gradients have left
    for name in ("short", "short again", "second", "last"):
        assert peak[name] < whole + little, name
    assert len(record["said"]) == 1 and "training waits while each is written" in record["said"][0]
    first, *others = [(out / f"step_00000{step}" / "model.safetensors").read_bytes() for step in (7, 8, 9)]
    assert all(other == first for other in others)


def test_free_memory_is_the_least_of_machine_and_control_groups(tmp_path, monkeypatch):
    """Both versions' files, as the kernel writes them."""
    assert 0 < host.available_memory() < 2**50
    second = ("memory.max", "memory.current"), "inactive_file 300\n"
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "inactive_file 7\ntotal_inactive_file 300\n"
    for names, files in (second, first):
        group = tmp_path / names[0]
        group.mkdir()
        for name, value in zip(names, (1000, 900), strict=True):
            (group / name).write_text(f"{value}\n")
        (group / "memory.stat").write_text(f"anon 600\n{files}")
        assert host._left_of(group) == 400
    (tmp_path / "memory.max" / "memory.max").write_text("max\n")
    assert host._left_of(tmp_path / "memory.max") == host._left_of(tmp_path / "nowhere") == 2**62


def test_a_large_model_has_several_files_and_an_index(models, ranks, tmp_path, monkeypatch):
    path = models["qwen3_5"]
    own = load_file(f"{path}/model.safetensors")
    monkeypatch.setattr(saver, "FILE_BYTES", sum(tensor.nbytes for tensor in own.values()) // 3)
    learner = Learner(path, LearnerArgs(), ranks, total_steps=10)
    assert not save_once(learner, tmp_path, train_sync.Args(), saver.Saver).error
    step = tmp_path / "step_000001"
    index = json.loads((step / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file.name: load_file(file) for file in step.glob("*.safetensors")}
    assert len(files) > 2 and {*files} == {*index.values()} and len([*step.glob("training/shard-*")]) > 2
    assert index == {name: file for file, tensors in files.items() for name in tensors}
    theirs, before = (AutoModelForCausalLM.from_pretrained(of).state_dict() for of in (step, path))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in before.items())
    tensors = learner.state_tensors()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    resume.load_tensors(step, tensors)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_a_checkpoint_is_on_disk_before_it_has_its_name_and_its_name_is_then(models, ranks, tmp_path, monkeypatch):
    learner = Learner(models["qwen2-tied"], LearnerArgs(), ranks, total_steps=10)
    done, to_disk, rename = [], saver._to_disk, os.rename
    monkeypatch.setattr(saver, "_to_disk", lambda path: (done.append(path), to_disk(path)))
    monkeypatch.setattr(os, "rename", lambda *names: (done.append(names), rename(*names)))
    assert not save_once(learner, tmp_path, train_sync.Args(), saver.Saver).error
    names = next(item for item in done if isinstance(item, tuple))
    before, after = done[: done.index(names)], done[done.index(names) + 1 :]
    parts = {path.relative_to(names[1]) for path in (names[1], *names[1].rglob("*"))}
    assert {names[0] / part for part in parts} <= {*before} and after[0] == tmp_path


def test_a_resumed_run_sets_later_checkpoints_aside_and_no_others(models, ranks, tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"step_00000{step}").mkdir()
    learner = Learner(models["qwen2-tied"], LearnerArgs(), ranks, total_steps=10)
    run = SimpleNamespace(dir=tmp_path, say=print)
    saver.Saver(train_sync.Args(), None, run, {}, learner, Origin(tmp_path, tmp_path / "step_000002"))
    assert {path.name for path in tmp_path.iterdir()} == {"step_000001", "step_000002", "step_000003.superseded"}

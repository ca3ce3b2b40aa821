"""Checkpoints on the nodes' own disks: each node keeps its learners' part, and an error names a missing part."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import bits, run_script, train
from nodes import Network, Unavailable
from safetensors.torch import load_file

SAVED = "tests/programs/reshard.py"


def save_on(ranks: int, model: str, out: Path) -> Path:
    out.mkdir()
    run_script(SAVED, model, "{}", "-", out, ranks=ranks, timeout=120)
    return out / "step_000001"


@pytest.mark.parametrize(("before", "now"), [(2, 3), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_what_a_learner_does_not_see_is_sent(models, tmp_path, before, now):
    """With any number of learners, each seeing some of the files. All files are compared with their checksums."""
    path = save_on(before, models["qwen2-tied"], tmp_path / "saved")
    done = run_script("tests/programs/scattered.py", models["qwen2-tied"], path, tmp_path / "disks", ranks=now, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    weights = load_file(path / "model.safetensors")
    assert found["tensors"] == 3 * len(weights) and found["same"] and found["whole"] == [None, None]
    name = f"training/shard-00002-of-0000{before}.safetensors"
    assert found["damage"]["changed"] == f"{name} does not fit its checksum"
    assert found["damage"]["missing"].startswith(f"{name} is missing or not ")


@pytest.mark.slow
def test_each_learner_reads_the_rows_of_its_own_part(models, tmp_path):
    """All parts together equal the contents of the files."""
    path = save_on(3, models["qwen3"], tmp_path / "saved")
    (tmp_path / "alone").mkdir()
    run_script(SAVED, models["qwen3"], "{}", path, tmp_path / "alone", ranks=2, timeout=120)
    first, second = (load_file(tmp_path / name / "tensors.safetensors") for name in ("saved", "alone"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    shards = [load_file(file) for file in sorted(path.glob("training/shard-*"))]
    for name, tensor in first.items():
        assert torch.equal(torch.cat([shard[name] for shard in shards]), tensor), name


@pytest.mark.slow
def test_pytorch_reads_the_files_too(models, tmp_path):
    path = save_on(2, models["moe"], tmp_path / "saved")
    expected = load_file(tmp_path / "saved" / "tensors.safetensors")
    found = {name: torch.full_like(tensor, -1.0) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(path / "training")), no_dist=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


FLAGS = ["--save-freq", 2, "--test-freq", 0, "--no-val-before-train", "--experiment-name", "run"]


@pytest.fixture
def network(tmp_path):
    """Two nodes; tmp_path/own is another directory on each."""
    (tmp_path / "own").mkdir()
    try:
        with Network(2, own=tmp_path / "own") as network:
            yield network
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_whose_nodes_share_no_disk_resumes_bit_for_bit(network, demo_model, tmp_path):
    def go(steps: int) -> list[tuple[int, str]]:
        flags = ["tests/programs/node_failures.py", "impatient", "train_sync.py", *FLAGS, "--output-dir", tmp_path / "own"]
        of_node = (1, [*flags, "--total-training-steps", steps])
        return network.start([of_node] * 2, rendezvous="static").wait(250)

    def of_node(number: int) -> Path:
        return tmp_path / "own" / f"node{number}" / "run"

    _, whole, _ = train("train_sync.py", *FLAGS, "--total-training-steps", 4, out=tmp_path / "shared", ranks=2)
    shutil.rmtree(whole / "step_000002")
    consoles = go(2)
    assert [code for code, _ in consoles] == [0, 0], consoles
    assert "node2 does not share" in consoles[0][1]
    found = [sorted(str(file.relative_to(of_node(2))) for file in of_node(2).rglob("*") if file.is_file())]
    assert found == [["step_000002/training/shard-00002-of-00002.safetensors"]]
    assert not (of_node(1) / found[0][0]).exists()

    consoles = go(4)
    assert [code for code, _ in consoles] == [0, 0] and "resumes after step 2 of 4" in consoles[0][1], consoles
    assert sorted(path.name for path in of_node(2).iterdir()) == ["step_000002", "step_000004"]
    shutil.rmtree(of_node(1) / "step_000002")
    assert bits(of_node(1)) == bits(whole)

    (of_node(2) / "step_000004" / "training" / "shard-00002-of-00002.safetensors").unlink()
    (code, console), _ = go(6)
    assert code == 1 and "shard-00002-of-00002.safetensors is missing" in console, console
    assert "node2 wrote it, on its own disk" in console and "every checkpoint of the run is damaged" in console

    shutil.rmtree(of_node(1))
    (code, console), _ = go(6)
    assert code == 1 and "node2 has its part of the run's checkpoints, node1 has none" in console, console


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weights_that_are_others_on_the_second_node_are_refused_and_missing_ones_are_sent(network, demo_model, tmp_path):
    copies = [tmp_path / "own" / f"node{number}" / "model" for number in (1, 2)]
    for copy in copies:
        shutil.copytree(demo_model, copy)
    file, own = copies[1] / "model.safetensors", tmp_path / "own"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    flags = ["train_async.py", "--model", own / "model", "--output-dir", tmp_path / "runs", "--total-training-steps", 1]
    flags += ["--train-files", "demo", "--no-val-before-train", "--generators"]
    nodes = [(2, [*flags, 1]), (1, [*flags, 0])]  # engines want the whole model, where they are
    (code, console), _ = network.start(nodes).wait(250)
    assert code == 1 and f"--model {own}/model: model.safetensors on node2 is not the file that node1 has" in console, console
    file.unlink()
    consoles = network.start(nodes).wait(250)
    assert [code for code, _ in consoles] == [0, 0], consoles

"""How much memory a save takes, what it writes, and what it does when a learner fails."""

import json

import pytest
import torch
import xxhash
from helpers import run_script
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from rl.checkpoint import exports, manifest
from rl.checkpoint.best import Best
from rl.hub import tensor_reader, tensor_writer
from rl.hub.tensor_writer import TensorFile, piece_sizes, pieces
from rl.ranks import host

BYTES = {"weights": 4, "gradients": 4, "moments": 8}  # of a parameter in fp32
SAVED = BYTES["weights"] + BYTES["moments"]  # what training changes


def write(path, tensors: dict[str, torch.Tensor], dtype=None, **metadata: str) -> tuple[int, str]:
    file = TensorFile(path, [(name, dtype or t.dtype, t.shape) for name, t in tensors.items()], metadata)
    for tensor in tensors.values():
        for piece in pieces(tensor, dtype or tensor.dtype):
            file.write(piece)
    return file.close()


@pytest.mark.parametrize("piece_bytes", [8, 64, 1 << 20])
def test_files_are_what_safetensors_reads(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(tensor_writer, "PIECE_BYTES", piece_bytes)
    torch.manual_seed(0)
    tensors = {f"a.{i}": torch.randn(shape) for i, shape in enumerate([(3, 5), (7,), (), (0, 4), (2, 3, 4), (1, 1)])}
    tensors |= {"half": torch.randn(5, 3).bfloat16(), "turned": torch.randn(4, 6).t(), "double": torch.randn(3).double()}
    size, digest = write(tmp_path / "file", tensors, format="pt", note="é")
    data = (tmp_path / "file").read_bytes()
    read = load(data)
    assert read.keys() == tensors.keys() and size == len(data) and digest == xxhash.xxh3_128_hexdigest(data)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "é"}
    write(tmp_path / "bf16", {"x": tensors["a.0"]}, torch.bfloat16)
    assert load((tmp_path / "bf16").read_bytes())["x"].equal(tensors["a.0"].bfloat16())
    assert sum(piece_sizes(1000, torch.float32)) == 1000


def test_a_file_that_misses_bytes_is_no_file(tmp_path):
    file = TensorFile(tmp_path / "file", [("a", torch.float32, (4,))], {})
    file.write(torch.ones(3))
    with pytest.raises(ValueError, match=": 4 bytes of the tensors are missing"):
        file.close()


def saves(model, out, trouble: str):
    return run_script("tests/programs/saves.py", model, out, trouble, ranks=2, check=False, timeout=100)


@pytest.mark.parametrize("memory", ["whole", "short"])
def test_two_learners_write_the_whole_model_and_a_part_each(models, tmp_path, memory):
    """If one learner is short of memory, both write directly, and one message says so."""
    done = saves(models["qwen2-tied"], tmp_path, memory)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is written while training waits") == (memory == "short")
    step = tmp_path / "run" / "step_000002"
    assert manifest.damage(step) is None
    before, export = load_file(f"{models['qwen2-tied']}/model.safetensors"), load_file(step / "model.safetensors")
    assert before.keys() == export.keys() and all(torch.equal(export[name], before[name]) for name in before)
    shards = [load_file(step / "training" / f"shard-0000{i}-of-00002.safetensors") for i in (1, 2)]
    for name, tensor in before.items():
        assert torch.equal(torch.cat([shard[f"model.{name}"] for shard in shards]), tensor)
        assert all(len(shard[f"exp_avg.{name}"]) == len(shard[f"model.{name}"]) for shard in shards)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("refuses", "No space left on device"),
        ("elsewhere", "all learners must see the same --output-dir"),
        ("full", "No space left on device"),
    ],
)
def test_an_incomplete_checkpoint_is_none_and_training_continues(models, tmp_path, trouble, reason):
    done = saves(models["qwen2-tied"], tmp_path, trouble)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Training continues") == 2 and reason in done.stderr
    assert done.stdout.count(" continued: ") == 2 and not list(tmp_path.glob("run/step_*"))


def test_a_learner_that_is_killed_in_a_save_is_not_a_checkpoint_that_could_not_be_written(models, tmp_path):
    done = saves(models["qwen2-tied"], tmp_path, "killed")
    assert done.returncode != 0 and "continued" not in done.stdout
    assert "could not be written" not in done.stderr and "Training continues" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_learner_holds_what_the_docs_count(tmp_path):
    """At 116M parameters: bytes of host memory a parameter, on a CPU, one learner; docs/checkpoints.md has the table."""
    model, out = tmp_path / "model", tmp_path / "out"
    run_script(
        "-c",
        f"import sys; sys.path[:0] = ['benchmarks']; import common; common.random_model({str(model)!r}, 768, 12, 2048)",
        fresh=True,
    )
    done = run_script("tests/programs/memory.py", model, out, fresh=True, timeout=500)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["parameters"] > 100e6
    peak = {name: added for name, (added, _) in record["bytes"].items()}
    kept = {name: kept for name, (_, kept) in record["bytes"].items()}
    little = 0.5  # pieces, buffers, Python's own
    assert kept["start"] <= peak["start"] < BYTES["weights"] + 2 * little  # the pieces' memory stays (rl/ranks/device.py)
    assert peak["step"] < BYTES["gradients"] + BYTES["moments"] + little
    assert peak["publish"] < 4 + little  # one copy in the generators' precision, here fp32
    assert 0.6 * SAVED < peak["first"] < 1.1 * SAVED  # a part may come out of what the gradients have left
    for name in ("short", "short again", "second", "last"):
        assert peak[name] < little, name
    assert len(record["said"]) == 1 and "is written while training waits" in record["said"][0]
    digests = [json.loads((out / f"step_00000{step}" / "manifest.json").read_text())["files"] for step in (7, 8, 9)]
    shards = [{name: of for name, of in files.items() if name.endswith(".safetensors")} for files in digests]
    assert shards[0] == shards[1] == shards[2]


def test_free_memory_is_the_least_of_machine_and_control_groups(tmp_path, monkeypatch):
    """Both versions' files, as the kernel writes them."""
    assert 0 < host.available_memory() < 2**50
    for names, files in ((("memory.max", "memory.current"), "inactive_file 300\n"),) * 1 + (
        (("memory.limit_in_bytes", "memory.usage_in_bytes"), "inactive_file 7\ntotal_inactive_file 300\n"),
    ):
        group = tmp_path / names[0]
        group.mkdir()
        for name, value in zip(names, (1000, 900), strict=True):
            (group / name).write_text(f"{value}\n")
        (group / "memory.stat").write_text(f"anon 600\n{files}")
        assert host._left_of(group) == 400
    (tmp_path / "memory.max" / "memory.max").write_text("max\n")
    assert host._left_of(tmp_path / "memory.max") == host._left_of(tmp_path / "nowhere") == 2**62


@pytest.mark.parametrize("scores", [(-5.0, -2.0, -3.0), (-1.0, -1.0, -1.0), (0.2, 0.9, 0.9), (-1e9, -1e8, -1e30)])
def test_the_best_saved_step_is_kept_whatever_scores_are(tmp_path, scores):
    """A user's reward without an accuracy may give only negative validation scores."""
    steps = dict(enumerate(scores, 1))
    for step in steps:
        (export := tmp_path / f"step_{step:06d}").mkdir()
        for name in (manifest.MANIFEST, "model.safetensors"):
            (export / name).write_text(f"{step}")
    for step, score in steps.items():  # one validation each, as in a run that resumes after every step
        Best(tmp_path, is_main=True).scored(step, score)
    best = min(step for step in steps if steps[step] == max(scores))
    assert json.loads((tmp_path / "best" / "best.json").read_text()) == {"step": best, "score": steps[best]}
    assert (tmp_path / "best" / "model.safetensors").read_text() == f"{best}"


def test_what_the_model_lacks_is_copied_into_the_last_file(tmp_path, monkeypatch):
    """A hybrid model's weights mtp.*, in pieces, in their own precision, behind the model's in several files."""
    monkeypatch.setattr(tensor_writer, "PIECE_BYTES", 64)
    own = {"a": torch.randn(5, 6), "b": torch.randn(7)}
    mtp = {"mtp.norm.weight": torch.randn(9).bfloat16(), "mtp.fc.weight": torch.randn(8, 9)}
    save_file(own | mtp, tmp_path / "model.safetensors")
    plan = split_torch_state_dict_into_shards(own, max_shard_size=60)
    copied = exports._further_tokens(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    stream = (piece for name in sorted(own) for piece in pieces(own[name], torch.bfloat16))
    (tmp_path / "saved").mkdir()
    parts = {name: [(name, tensor.shape)] for name, tensor in own.items()}
    written = tensor_writer.write_model(tmp_path / "saved", plan, parts, dict.fromkeys(own, torch.bfloat16), stream, copied)
    assert len(written) == 2
    stored = tensor_reader.stored_tensors(str(tmp_path / "saved"))  # as the index lists them
    assert stored.keys() == own.keys() | mtp.keys()
    read = {name: tensor for file in written for name, tensor in load_file(tmp_path / "saved" / file).items()}
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in mtp.items())
    assert all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in own.items())

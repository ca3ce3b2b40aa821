"""The memory-saving AdamW steps, saves and restores parameters of every shape."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import SMALL, run_script
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from examples.demo.sums import build_tokenizer
from rl.hub.tensor_writer import TensorFile, pieces
from rl.learning.compact_adamw import CompactAdamW

SHAPES = [(1, 64), (1, 256), (1, 257), (1, 63), (64, 1), (300, 1), (1, 1), (1,), (70,), (), (0,), (0, 64), (64, 0), (1, 1, 64)]
SHAPES += [(2, 1, 64), (3, 1, 600), (1, 2, 256), (17, 64)]
KINDS = [(False, False), (False, True), (True, False), (True, True)]


def optimizer_of(values: list[torch.Tensor], on_host: bool, in_8_bits: bool) -> CompactAdamW:
    return CompactAdamW([torch.nn.Parameter(x.clone()) for x in values], 0.1, (0.9, 0.95), 0.01, on_host, in_8_bits)


def step(optimizer: CompactAdamW, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(parameter.shape, generator=made)
    optimizer.step()


def values(optimizer: CompactAdamW) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in optimizer.param_groups[0]["params"]]


@pytest.mark.parametrize(("on_host", "in_8_bits"), KINDS)
def test_every_shape_is_stepped_saved_and_restored_to_the_bit(tmp_path, on_host, in_8_bits):
    """The state passes through a file, as in a checkpoint."""
    made = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=made) for shape in SHAPES]
    whole = optimizer_of(start, on_host, in_8_bits)
    for seed in range(2):
        step(whole, seed)
    state = {f"{i} {name}": t for i, p in enumerate(whole.state.values()) for name, t in p.items() if name != "step"}
    state |= {f"{i} value": value for i, value in enumerate(values(whole))}
    file = TensorFile(tmp_path / "file", [(name, t.dtype, t.shape) for name, t in state.items()], {})
    for tensor in state.values():
        for piece in pieces(tensor, tensor.dtype):
            file.write(piece)
    file.close()
    read = load_file(tmp_path / "file")
    assert read.keys() == state.keys() and all(torch.equal(read[name], state[name]) for name in state)

    rest = optimizer_of([read[f"{i} value"] for i in range(len(SHAPES))], on_host, in_8_bits)
    for i, parameter in enumerate(rest.param_groups[0]["params"]):
        for name, tensor in rest.begin(parameter).items():
            if name == "step":
                tensor.fill_(2)
            else:
                tensor.copy_(read[f"{i} {name}"])
    for optimizer in (whole, rest):
        step(optimizer, 2)
    assert all(torch.equal(a, b) for a, b in zip(values(whole), values(rest), strict=True))


@pytest.mark.parametrize("on_host", [False, True])
def test_every_shape_is_stepped_as_torchs_own_does(on_host):
    made = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=made) for shape in SHAPES]
    ours = optimizer_of(start, on_host, in_8_bits=False)
    plain = [torch.nn.Parameter(x.clone()) for x in start]
    theirs = torch.optim.AdamW(plain, lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    for seed in range(3):
        step(ours, seed)
        for parameter, own in zip(plain, ours.param_groups[0]["params"], strict=True):
            parameter.grad = own.grad.clone()
        theirs.step()
    for found, expected, shape in zip(values(ours), plain, SHAPES, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6, msg=str(shape))


def test_one_element_of_any_stride_is_written(tmp_path):
    """Such a slice counts as contiguous."""
    rows = torch.arange(12.0).view(3, 4)
    tensors = {"row": rows[:1, ::4], "column": rows[::3, :1], "every other": torch.arange(6.0)[::2], "none": rows[:0, ::2]}
    file = TensorFile(tmp_path / "file", [(name, t.dtype, t.shape) for name, t in tensors.items()], {})
    for tensor in tensors.values():
        for piece in pieces(tensor, tensor.dtype):
            file.write(piece)
    file.close()
    with safe_open(tmp_path / "file", "np") as read:
        assert all(np.array_equal(read.get_tensor(name), tensor.numpy()) for name, tensor in tensors.items())


@pytest.fixture(scope="module")
def with_a_row(tmp_path_factory) -> str:
    """A mixture whose shared expert has a gate of one row: [1, 64]."""
    path = tmp_path_factory.mktemp("row")
    torch.manual_seed(0)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    tokenizer = build_tokenizer()
    config = Qwen2MoeConfig(**SMALL | {"vocab_size": len(tokenizer)}, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def shards(out: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((out / "run" / "step_000002" / "training").glob("*.safetensors"))]


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_of_such_a_model_saves_its_last_step_and_resumes_bit_for_bit(with_a_row, tmp_path, ranks):
    """The last save writes the tensors themselves, not copies of them."""
    flags = ["--model", with_a_row, "--optim", "adamw_8bit", "--lr-scheduler-type", "constant", "--lr-warmup-steps", 0]
    flags += ["--train-batch-size", 2, "--rollout-n", 2, "--max-response-length", 4, "--test-freq", 0, "--entropy-coeff", 1]
    for out, totals in ((tmp_path / "whole", (2,)), (tmp_path / "parts", (1, 2))):
        for total in totals:
            how = ["--output-dir", out, "--experiment-name", "run", "--total-training-steps", total]
            run_script("train_sync.py", *how, *flags, ranks=ranks)
    assert shards(tmp_path / "whole") == shards(tmp_path / "parts") and len(shards(tmp_path / "whole")) == (ranks or 1)


@pytest.mark.parametrize("layouts", [(1, 2), pytest.param((2, 1), marks=pytest.mark.slow)])
def test_a_checkpoint_with_a_parameter_of_one_row_fits_one_learner_and_two(with_a_row, tmp_path, layouts):
    """One of two learners has no part of the row."""
    came_from, found = "-", []
    for ranks in layouts:
        out = tmp_path / str(ranks)
        out.mkdir()
        flags = json.dumps({"optim": "adamw_8bit"})
        run_script("tests/programs/reshard.py", with_a_row, flags, came_from, out, ranks=ranks, timeout=120)
        came_from = out / "step_000001"
        found.append(load_file(out / "tensors.safetensors"))
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    assert found[0][f"exp_avg.{name}"].shape == (1, 64) and found[0][f"exp_avg.{name}"].dtype == torch.uint8
    assert found[0][f"exp_avg_scale.{name}"].shape == (1, 1) and len(found[0][f"exp_avg.{name}"].unique()) > 8

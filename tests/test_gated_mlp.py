"""The gated MLP that keeps less for the backward pass: every bit is that of transformers' module."""

import importlib

import numpy as np
import pytest
import torch
from helpers import SMALL, make_group
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig

from rl import gated_mlp
from rl.batch import Batch, micro_batches
from rl.blocks import local
from rl.learner import Learner, LearnerArgs

MODULES = {
    "LlamaMLP": "llama",
    "MistralMLP": "mistral",
    "Qwen2MLP": "qwen2",
    "Qwen2MoeMLP": "qwen2_moe",
    "Qwen3MLP": "qwen3",
    "Qwen3MoeMLP": "qwen3_moe",
    "Qwen3VLTextMLP": "qwen3_vl",
}


@pytest.fixture
def however_small(monkeypatch):
    monkeypatch.setattr(gated_mlp, "WORTH_IT", 0)


def make_mlp(name: str, **flags):
    """A random one, the same each time."""
    torch.manual_seed(0)
    made = getattr(importlib.import_module(f"transformers.models.{MODULES[name]}.modeling_{MODULES[name]}"), name)
    return made(LlamaConfig(hidden_size=48, intermediate_size=160, num_attention_heads=4, **flags))


def passes(mlp, x: torch.Tensor, grad: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """(its output, the gradients of x and of its weights; elements kept for the backward pass, parameters aside)"""
    x, kept = x.clone().requires_grad_(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = mlp(x)
    out.backward(grad)
    own = {p.data_ptr() for p in mlp.parameters()}
    grads = [x.grad, *(p.grad for p in mlp.parameters() if p.grad is not None)]
    return [out.detach(), *grads], sum(t.numel() for pointer, t in kept.items() if pointer not in own)


def test_all_classes_are_tested():
    assert set(MODULES) == gated_mlp.CLASSES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_bits_are_the_modules_and_half_of_the_inner_activations_is_kept(however_small, name, dtype):
    plain, lean = make_mlp(name).to(dtype), make_mlp(name).to(dtype)
    gated_mlp.keep_less(lean)
    x, grad = torch.randn(2, 1, 37, 48).to(dtype)
    (expected, all_kept), (found, kept) = passes(plain, x, grad), passes(lean, x, grad)
    assert len(found) == 5
    assert all(map(torch.equal, found, expected))
    assert (all_kept, kept) == (37 * (48 + 4 * 160), 37 * (48 + 2 * 160))
    with torch.no_grad():
        assert torch.equal(lean(x), plain(x))


def test_frozen_weights_get_no_gradient_and_pass_it_on(however_small):
    plain, lean = (make_mlp("Qwen3MLP").requires_grad_(False) for _ in range(2))
    gated_mlp.keep_less(lean)
    x, grad = torch.randn(2, 1, 37, 48)
    (expected, _), (found, _) = passes(plain, x, grad), passes(lean, x, grad)
    assert len(found) == 2
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("flags", [{"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_other_formulas_are_left_alone(however_small, flags):
    mlp = make_mlp("LlamaMLP", **flags)
    gated_mlp.keep_less(mlp)
    assert "forward" not in vars(mlp)


def test_small_micro_batches_are_left_alone():
    mlp = make_mlp("LlamaMLP")
    gated_mlp.keep_less(mlp)
    x = torch.randn(1, gated_mlp.WORTH_IT // 160 + 1, 48)
    assert passes(mlp, x[:, :-1], x[:, :-1])[1] > x[:, :-1].numel() * 4 * 160 // 48
    assert passes(mlp, x, x)[1] < x.numel() * 4 * 160 // 48


@pytest.mark.parametrize("flags", [{}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_a_learner_learns_the_same_bits(ranks, models, monkeypatch, flags):
    calls, silu = [], torch.nn.functional.silu
    monkeypatch.setattr(torch.nn.functional, "silu", lambda *args, **flags: calls.append(1) or silu(*args, **flags))

    def update(worth_it: int) -> tuple[list[torch.Tensor], int, int]:
        """Gradients and the new weights; how often silu was computed; micro-batches."""
        monkeypatch.setattr(gated_mlp, "WORTH_IT", worth_it)
        calls.clear()
        learner = Learner(models["qwen3"], LearnerArgs(lr=1e-2, **flags), ranks, 10)
        batch = Batch.of([make_group(t, [3, 9, 5], rng=np.random.default_rng(t)) for t in range(2)])
        micros = micro_batches(batch, torch.arange(len(batch.lengths)), 40, ranks)
        for micro in micros:
            log_prob, _ = learner.log_probs(micro)
            (-log_prob.sum() / len(batch.token)).backward()
        grads = [local(p.grad).clone() for p in learner.parameters.values()]
        learner.step()
        return grads + [weight.clone() for _, weight in learner.weights()], len(calls), len(micros)

    (plain, once, _), (lean, calls_again, micros) = update(2**60), update(0)
    assert all(map(torch.equal, lean, plain))
    assert calls_again == once + micros * SMALL["num_hidden_layers"]  # each layer's once more, in the backward pass

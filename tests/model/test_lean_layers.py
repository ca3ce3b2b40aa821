"""Decoder layers with hand-written backward passes: bit for bit transformers' values and autograd's gradients."""

import contextlib
import importlib

import numpy as np
import pytest
import torch
from helpers import SMALL, make_group
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModel, LlamaConfig

from rl.errors import UserError
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.model import lean_layers
from rl.model.attention import ATTENTION, Packed
from rl.model.shards import local

MLPS = {
    "LlamaMLP": "llama",
    "MistralMLP": "mistral",
    "Qwen2MLP": "qwen2",
    "Qwen2MoeMLP": "qwen2_moe",
    "Qwen3MLP": "qwen3",
    "Qwen3MoeMLP": "qwen3_moe",
    "Qwen3VLTextMLP": "qwen3_vl",
}
LAYERS = {  # a layer's class -> its family and what its config says besides the sizes
    "LlamaDecoderLayer": ("llama", {"attention_bias": True, "mlp_bias": False}),
    "Qwen2DecoderLayer": ("qwen2", {}),
    "Qwen2MoeDecoderLayer": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "Qwen2_5_VLDecoderLayer": ("qwen2_5_vl_text", {}),
    "Qwen3DecoderLayer": ("qwen3", {}),
    "Qwen3MoeDecoderLayer": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "Qwen3VLTextDecoderLayer": ("qwen3_vl_text", {}),
}
SIZES = {"hidden_size": 48, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}


@pytest.fixture
def however_small(monkeypatch):
    monkeypatch.setattr(lean_layers, "WORTH_IT", 0)


def make_mlp(name: str, **flags):
    """Make a random MLP, the same each time."""
    torch.manual_seed(0)
    made = getattr(importlib.import_module(f"transformers.models.{MLPS[name]}.modeling_{MLPS[name]}"), name)
    return made(LlamaConfig(hidden_size=48, intermediate_size=160, num_attention_heads=4, **flags))


@contextlib.contextmanager
def counting(model):
    """Yield a list. At the end it holds the bytes saved for the backward pass, each storage once, without parameters."""
    own, kept, size = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}, []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield size
    size.append(sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own))


def passes(mlp, x: torch.Tensor, grad: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """(its output, the gradients of x and of its weights; elements kept for the backward pass, parameters aside)"""
    x = x.clone().requires_grad_()
    with counting(mlp) as kept:
        out = mlp(x)
    out.backward(grad)
    grads = [x.grad, *(p.grad for p in mlp.parameters() if p.grad is not None)]
    return [out.detach(), *grads], kept[0] // x.element_size()


def test_all_classes_are_tested():
    assert set(MLPS) == lean_layers.MLPS and set(LAYERS) == lean_layers.LAYERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MLPS)
def test_bits_are_the_modules_and_half_of_the_inner_activations_is_kept(however_small, name, dtype):
    plain, lean = make_mlp(name).to(dtype), make_mlp(name).to(dtype)
    lean_layers.keep_less(lean)
    x, grad = torch.randn(2, 1, 37, 48).to(dtype)
    (expected, all_kept), (found, kept) = passes(plain, x, grad), passes(lean, x, grad)
    assert len(found) == 5
    assert all(map(torch.equal, found, expected))
    assert (all_kept, kept) == (37 * (48 + 4 * 160), 37 * (48 + 2 * 160))
    with torch.no_grad():
        assert torch.equal(lean(x), plain(x))


def test_frozen_weights_get_no_gradient_and_pass_it_on(however_small):
    plain, lean = (make_mlp("Qwen3MLP").requires_grad_(False) for _ in range(2))
    lean_layers.keep_less(lean)
    x, grad = torch.randn(2, 1, 37, 48)
    (expected, _), (found, _) = passes(plain, x, grad), passes(lean, x, grad)
    assert len(found) == 2
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("flags", [{"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_other_formulas_are_left_alone(however_small, flags):
    mlp = make_mlp("LlamaMLP", **flags)
    lean_layers.keep_less(mlp)
    assert "forward" not in vars(mlp)


def test_small_micro_batches_are_left_alone():
    mlp = make_mlp("LlamaMLP")
    lean_layers.keep_less(mlp)
    x = torch.randn(1, lean_layers.WORTH_IT // 160 + 1, 48)
    assert passes(mlp, x[:, :-1], x[:, :-1])[1] > x[:, :-1].numel() * 4 * 160 // 48
    assert passes(mlp, x, x)[1] < x.numel() * 4 * 160 // 48


# ------------------------------------------------------------------------------------------------------ whole layers


def make_models(name: str, dtype: torch.dtype = torch.float32, **flags) -> list:
    """Return the same random model of two layers twice."""
    family, of_family = LAYERS[name]
    if "vl" in family:
        flags["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    config = AutoConfig.for_model(family, **SIZES | of_family | flags, vocab_size=40, num_hidden_layers=2)
    config._attn_implementation = ATTENTION
    torch.manual_seed(0)
    first, second = (AutoModel.from_config(config).to(dtype) for _ in range(2))
    assert type(first.layers[0]).__name__ == name
    for parameter in first.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))  # biases and norms, too
    second.load_state_dict(first.state_dict())
    return [first, second]


def row() -> tuple[Packed, torch.Tensor]:
    """Two prompts with two responses each, and their tokens."""
    layout = Packed([5, 7, 3, 4, 9, 6], after=[-1, 0, 0, -1, 3, 3])
    return layout, torch.randint(40, (34,), generator=torch.Generator().manual_seed(1))


def run(model) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """(hidden states [34, 48], the gradients of all weights, bytes kept for the backward pass, parameters aside)"""
    layout, ids = row()
    with counting(model) as kept:
        out = model(**layout.inputs(ids), use_cache=False, layout=layout)[0][0]
    out.backward(torch.randn(34, 48, generator=torch.Generator().manual_seed(2)).to(out.dtype))
    return out.detach(), [p.grad for p in model.parameters()], kept[0]


@pytest.mark.parametrize("worth_it", [0, 2**60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_values_and_gradients_are_transformers_to_the_bit(monkeypatch, name, dtype, worth_it):
    monkeypatch.setattr(lean_layers, "WORTH_IT", worth_it)
    plain, lean = make_models(name, dtype)
    lean_layers.keep_less(lean)
    (expected, by_autograd, all_kept), (found, grads, kept) = run(plain), run(lean)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, grads, by_autograd))
    assert all(grad.dtype == dtype for grad in grads)
    assert kept < (1 if "Moe" in name else 0.9) * all_kept
    layout, ids = row()
    with torch.no_grad():
        assert torch.equal(*(model(**layout.inputs(ids), use_cache=False, layout=layout)[0] for model in (lean, plain)))


def test_transformers_own_attention_finds_the_layer_as_it_was():
    plain, lean = make_models("Qwen3DecoderLayer")
    lean_layers.keep_less(lean)
    ids = torch.randint(40, (2, 9))
    for model in (plain, lean):
        model.config._attn_implementation = "eager"
        model(input_ids=ids, use_cache=False)[0].square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(lean.parameters(), plain.parameters(), strict=True))


class Adapted(torch.nn.Linear):
    """A projection with an adapter of rank one, as LoRA has."""

    def __init__(self, of: torch.nn.Linear):
        super().__init__(of.in_features, of.out_features, of.bias is not None)
        self.load_state_dict(of.state_dict())
        self.first = torch.nn.Parameter(torch.full((1, of.in_features), 0.1))
        self.second = torch.nn.Parameter(torch.full((of.out_features, 1), 0.1))

    def forward(self, x):
        return super().forward(x) + x @ self.first.t() @ self.second.t()


@pytest.mark.parametrize("name", [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")])
def test_adapters_put_on_a_loaded_model_are_computed_and_trained(however_small, name):
    plain, lean = make_models("LlamaDecoderLayer")
    lean_layers.keep_less(lean)
    for model in (plain, lean):
        parent, _, leaf = name.rpartition(".")
        within = model.layers[1].get_submodule(parent)
        setattr(within, leaf, Adapted(getattr(within, leaf)))
    (expected, by_autograd, _), (found, grads, _) = run(plain), run(lean)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, grads, by_autograd))
    assert lean.get_submodule(f"layers.1.{name}").second.grad.abs().sum() > 0


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_put_on_a_loaded_model_are_called(however_small, register):
    model, _ = make_models("Qwen3DecoderLayer")
    lean_layers.keep_less(model)
    heard, inner = [], [name for name, _ in model.layers[1].named_modules() if name]
    for name in inner:
        hook = getattr(model.layers[1].get_submodule(name), register)(lambda *_, name=name: heard.append(name))
        run(model)
        hook.remove()
    assert set(heard) == set(inner)


def test_a_window_that_is_outgrown_is_refused():
    windows = {"use_sliding_window": True, "sliding_window": 12, "layer_types": ["full_attention", "sliding_attention"]}
    layout, ids = row()
    model, _ = make_models("Qwen2DecoderLayer", **windows)
    lean_layers.keep_less(model)
    model(**layout.inputs(ids), use_cache=False, layout=Packed([12, 12, 10]))
    with pytest.raises(UserError, match=r"attends to 12 tokens \(sliding window\), a sequence has 13"):
        model(**layout.inputs(ids), use_cache=False, layout=layout)


def test_layers_of_other_formulas_are_left_alone():
    config = AutoConfig.for_model("olmo2", **SIZES, vocab_size=40, num_hidden_layers=1)
    model = AutoModel.from_config(config)
    lean_layers.keep_less(model)
    assert not any("forward" in vars(module) for module in model.modules())


# ------------------------------------------------------------------------------------------------------ learners


def gradients(model: str, ranks, flags: dict) -> tuple[Learner, list[torch.Tensor], int]:
    """A new learner, its gradients of two micro-batches or more, and how many."""
    learner = Learner(model, LearnerArgs(lr=1e-2, **flags), ranks, 10)
    batch = Batch.of([make_group(t, [3, 9, 5], rng=np.random.default_rng(t)) for t in range(2)])
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), 40, ranks)
    for micro in micros:
        log_prob, _ = learner.log_probs(micro)
        (-log_prob.sum() / len(batch.token)).backward()
    return learner, [local(p.grad).clone() for p in learner.parameters.values()], len(micros)


@pytest.mark.parametrize("flags", [{}, {"gradient_checkpointing": True}, {"dtype": "bfloat16"}])
def test_a_learners_mlps_learn_the_same_bits(ranks, models, monkeypatch, flags):
    calls, silu = [], torch.nn.functional.silu
    monkeypatch.setattr(torch.nn.functional, "silu", lambda *args, **flags: calls.append(1) or silu(*args, **flags))

    def update(worth_it: int) -> tuple[list[torch.Tensor], int, int]:
        """Return the gradients and the new weights, the number of silu computations, and the number of micro-batches."""
        monkeypatch.setattr(lean_layers, "WORTH_IT", worth_it)
        calls.clear()
        learner, grads, micros = gradients(models["qwen3"], ranks, flags)
        learner.step()
        return grads + [weight.clone() for _, weight in learner.weights()], len(calls), micros

    (plain, once, _), (lean, calls_again, micros) = update(2**60), update(0)
    assert all(map(torch.equal, lean, plain))
    assert calls_again == once + micros * SMALL["num_hidden_layers"]  # each layer's once more, in the backward pass


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_a_learner_learns_what_it_learns_by_autograd(ranks, models, monkeypatch, kind):
    _, found, _ = gradients(models[kind], ranks, {})
    monkeypatch.setattr("rl.learning.placement.keep_less", lambda model: None)
    _, expected, _ = gradients(models[kind], ranks, {})
    assert all(map(torch.equal, found, expected))


def test_what_a_learner_computes_is_checked_at_the_start(ranks, models, monkeypatch):
    monkeypatch.setattr(lean_layers, "_scale", lambda x, epsilon: torch.ones_like(x[..., :1]))
    with pytest.raises(UserError, match="differ from transformers'"):
        Learner(models["qwen3"], LearnerArgs(), ranks, 10)

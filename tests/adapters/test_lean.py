"""Adapted projections with hand-written backward passes: bit for bit the plain modules' values and autograd's gradients."""

import pytest
import torch
from test_lean_layers import LAYERS, counting, make_models, row

from rl.adapters import lora
from rl.learning.args import AdapterArgs
from rl.model import lean_layers


class Whole(torch.nn.Module):
    """A decoder as a causal language model has it."""

    def __init__(self, decoder: torch.nn.Module):
        super().__init__()
        self.model, self.config = decoder, decoder.config


def adapted(decoder: torch.nn.Module, target: tuple[str, ...], dtype: torch.dtype) -> lora.Adapters:
    adapters = lora.adapt(Whole(decoder), AdapterArgs(lora_rank=4, lora_target=target), "--model X")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).mul(0.1).to(dtype)
    return adapters


def passes(decoder: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Values, gradients by name, and the bytes kept between the passes, parameters aside."""
    layout, ids = row()
    with counting(decoder) as kept:
        out = decoder(**layout.inputs(ids), use_cache=False, layout=layout)[0]
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype))
    return out.detach(), {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}, kept[0]


@pytest.mark.parametrize("worth_it", [0, 2**60])
@pytest.mark.parametrize("target", [lora.ALL_LINEAR, ("q_proj", "v_proj", "up_proj"), ("q_proj", "o_proj", "down_proj")])
@pytest.mark.parametrize("name", [name for name in LAYERS if "Moe" not in name])
def test_values_and_gradients_are_those_of_plain_modules(monkeypatch, name, target, worth_it):
    monkeypatch.setattr(lean_layers, "WORTH_IT", worth_it)
    for dtype in (torch.float32, torch.bfloat16):
        full, _ = make_models(name, dtype)
        plain, lean = make_models(name, dtype)
        lean_layers.keep_less(full)
        lean_layers.keep_less(lean)
        adapters = [adapted(model, target, dtype) for model in (plain, lean)]
        (expected, by_autograd, all_kept), (found, grads, kept), (_, _, of_full) = map(passes, (plain, lean, full))
        assert torch.equal(found, expected) and grads.keys() == by_autograd.keys()
        assert len(grads) == len(adapters[0].tensors)
        assert all(torch.equal(grads[name], by_autograd[name]) for name in grads)
        if not worth_it and target == lora.ALL_LINEAR:
            thin = 34 * 4 * dtype.itemsize * len(adapters[0].names)  # what A makes of each token
            assert kept <= of_full + thin < 0.9 * all_kept
        for of in adapters:
            of.on = False
        layout, ids = row()
        with torch.no_grad():
            off, base = (model(**layout.inputs(ids), use_cache=False, layout=layout)[0] for model in (lean, full))
        assert torch.equal(off, base) and not torch.equal(off, found)

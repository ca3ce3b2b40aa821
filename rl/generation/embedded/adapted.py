"""The embedded engine's products of a model whose adapters come by themselves (--publish adapter): they are added to that of
the weight, which stays as it was loaded."""

import torch
from transformers import PreTrainedModel

from rl.adapters.lora import AdaptedLinear, AdapterArgs, Adapters, adapt
from rl.generation.embedded.forward import plain_add_linear, plain_linear


@torch.no_grad()
def give(model: PreTrainedModel, args: AdapterArgs, where: str, dtype: torch.dtype) -> Adapters:
    """Gives layers of the model adapters, which do nothing until an update brings them values."""
    adapters = adapt(model, args, where)
    for name in adapters.tensors:
        parameter = model.get_parameter(name)
        parameter.data = torch.zeros_like(parameter, dtype=dtype)
    return adapters


def linear(x: torch.Tensor, layer) -> torch.Tensor:
    """x [A, in] -> [A, out]"""
    out = plain_linear(x, layer)
    return _with_adapter(out, x, layer) if type(layer) is AdaptedLinear else out


def add_linear(x: torch.Tensor, h: torch.Tensor, layer) -> torch.Tensor:
    """x [A, out], h [A, in] -> [A, out]"""
    out = plain_add_linear(x, h, layer)
    return _with_adapter(out, h, layer) if type(layer) is AdaptedLinear else out


def _with_adapter(out: torch.Tensor, x: torch.Tensor, layer: AdaptedLinear) -> torch.Tensor:
    """out [A, out] and the layer's adapter of x [A, in]"""
    if not layer.adapters.on:
        return out
    return torch.addmm(out, x @ layer.lora_A.t(), layer.lora_B.t(), alpha=layer.adapters.scale)


PRODUCTS = (linear, add_linear)

"""The embedded engine's products for a model that gets adapters without its weights (--publish adapter): the adapter's product
is added to that of the weight, which stays as it was loaded."""

import torch
from transformers import PreTrainedModel

from rl.adapters.lora import AdaptedLinear, AdapterArgs, Adapters, adapt
from rl.generation.embedded.forward import plain_add_linear, plain_linear


@torch.no_grad()
def give(model: PreTrainedModel, args: AdapterArgs, where: str, dtype: torch.dtype) -> Adapters:
    """Add adapters to layers of the model, without effect until an update sets them. where: names the model in a UserError."""
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
    """Add the layer's adapter of x [A, in] to out [A, out]."""
    if not layer.adapters.on:
        return out
    return torch.addmm(out, x @ layer.lora_A.t(), layer.lora_B.t(), alpha=layer.adapters.scale)


PRODUCTS = (linear, add_linear)

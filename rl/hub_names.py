"""The names under which a model's weights are known on the hub, where transformers holds them otherwise in memory.

It fuses all experts of a layer into two tensors; files on the hub, and the tools that read them, have a tensor for each of an
expert's projections, gate, up and down. Those are consecutive runs of the fused tensor's elements, so that an export needs
another header only, and no copy.
"""

import math

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

Parts = list[tuple[str, torch.Size]]  # (name, shape), end to end


def hub_names(model: nn.Module) -> dict[str, Parts]:
    """Each parameter's name in memory -> what its elements are on the hub, in their order. model: transformers'. What is not
    just cut there, but transposed, say, keeps name and shape: transformers reads either."""
    model._weight_conversions = None  # those of the files that it was read from; without them it takes the hub's
    return {name: _parts(model, name, parameter.shape) for name, parameter in model.named_parameters()}


def _parts(model: nn.Module, name: str, shape: torch.Size) -> Parts:
    parts = revert_weight_conversion(model, {name: torch.empty(shape, device="meta")})
    if len(parts) == 1:
        return [(name, shape)]
    small = (*shape[:-2], 4, 3)  # cut in the same way, its elements being their own numbers
    numbered = revert_weight_conversion(model, {name: torch.arange(math.prod(small)).view(small)})
    ordered = sorted(numbered, key=lambda part: int(numbered[part].flatten()[0]))
    if not torch.equal(torch.cat([numbered[part].flatten() for part in ordered]), torch.arange(math.prod(small))):
        return [(name, shape)]
    return [(part, parts[part].shape) for part in ordered]

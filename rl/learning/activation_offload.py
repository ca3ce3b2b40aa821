"""Keeps the layers' inputs, which gradient checkpointing saves for the backward pass, in host memory.

A layer's input has 2 x hidden size bytes a token in bf16, and those of all layers are most of a long sequence's memory. Each is
copied on the stream of the computation itself: a layer computes far longer than its input travels. Left out: activations
without gradient checkpointing, which are about twenty times as large.
"""

from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rl.ranks.device import is_accelerator


def keep_inputs_on_host(model: nn.Module, device: torch.device) -> None:
    """Change a model whose gradient checkpointing is on."""
    hooks = saved_tensors_hooks(_to_host, lambda kept: kept.to(device, non_blocking=True))
    for module in model.modules():
        if checkpoint := getattr(module, "_gradient_checkpointing_func", None):
            module._gradient_checkpointing_func = partial(_call, checkpoint, hooks)


def _call(checkpoint, hooks: saved_tensors_hooks, *args):
    """Computation within a checkpoint saves nothing, so the hooks only see the checkpoint's arguments."""
    with hooks:
        return checkpoint(*args)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    kept = torch.empty_like(tensor, device="cpu", pin_memory=is_accelerator(tensor.device))
    return kept.copy_(tensor, non_blocking=True)

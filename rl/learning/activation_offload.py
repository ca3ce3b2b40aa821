"""Keeps the inputs of layers, which gradient checkpointing saves for the backward pass, in host memory.

A layer's input is 2 x hidden size bytes a token in bf16; the inputs of all layers are most of a long sequence's memory. Each is
copied to the host when its layer starts, and back when the backward pass reaches it, on the queue of the computation itself: a
layer computes far longer than its input travels. Left out: activations without gradient checkpointing, about twenty times as
large.
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
    """The inside of a checkpoint saves nothing, so autograd only saves the checkpoint's own arguments."""
    with hooks:
        return checkpoint(*args)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    kept = torch.empty_like(tensor, device="cpu", pin_memory=is_accelerator(tensor.device))
    return kept.copy_(tensor, non_blocking=True)

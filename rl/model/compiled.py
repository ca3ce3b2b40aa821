"""`--compile`: the decoder layers of a model through torch.compile, one region a layer, for any number of tokens.

Attention stays as it is, between two compiled halves of a layer, because its layout holds Python objects that differ by
micro-batch. Left out: the embedded engine, which is slower with it (benchmarks/LOG.md).
"""

import torch
from torch import nn
from transformers import AttentionInterface

from rl.errors import UserError
from rl.model.attention import ATTENTION, attention_forward
from rl.model.pretrained import decoder_layers, has_experts


def compile_layers(model: nn.Module, where: str) -> None:
    """Compile each decoder layer at its first call. Raise UserError for a model with experts, or without a compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if has_experts(model.config):  # routes are replayed, counted and sent by Python at every layer
        raise UserError(f"{where}: --compile is for models without experts. Leave it out.")
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        remedy = "Install one (apt install g++), name one in the environment's CXX, or leave the flag out."
        raise UserError(f"--compile: there is no C++ compiler. {remedy}") from None
    torch._dynamo.config.recompile_limit = 64  # by default 8, after which layers would silently not be compiled
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attention_forward))
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward)

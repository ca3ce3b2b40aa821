"""`--compile`: the decoder layers of a model through torch.compile, one region a layer.

Everything between the products (norms, gate, rotation) becomes a few passes over memory. Attention stays as it is, between two
compiled halves of a layer, because its layout holds Python objects that differ by micro-batch. Regions are compiled once, for
any number of tokens, and all layers share them. The compiler keeps its work on disk (TORCHINDUCTOR_CACHE_DIR).
Left out: the embedded engine, which is slower with it (benchmarks/LOG.md).
"""

import functools

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from rl.errors import UserError
from rl.model.attention import ATTENTION, attention_forward
from rl.model.pretrained import decoder_layers
from rl.model.router import routers


def compile_layers(model: nn.Module, where: str) -> None:
    """Compile the forward of each decoder layer, at its first call. Raise UserError for a model with experts, or without a
    compiler."""
    if routers(model):  # routes are replayed, counted and sent by Python at every layer
        raise UserError(f"{where}: --compile is for models without experts. Leave it out.")
    _find_compiler()
    torch._dynamo.config.recompile_limit = 64  # by default 8, after which layers would silently not be compiled
    AttentionInterface.register(ATTENTION, torch.compiler.disable(_attention))
    for layer in decoder_layers(model):
        layer.forward = _for_any_length(torch.compile(layer.forward))


def _for_any_length(forward):
    """The compiled forward, for which only the number of tokens is left open: kernels with every size open are slow."""

    @functools.wraps(forward)
    def run(hidden_states, *args, **kwargs):  # [1, T, hidden]
        for x in tree_leaves((hidden_states, args, kwargs)):
            _open(x, hidden_states.shape[1])
        return forward(hidden_states, *args, **kwargs)

    return run


def _find_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        remedy = "Install one (apt install g++), name one in the environment's CXX, or leave the flag out."
        raise UserError(f"--compile: there is no C++ compiler. {remedy}") from None


def _attention(module, query, key, value, *args, **kwargs):
    out, weights = attention_forward(module, query, key, value, *args, **kwargs)  # [B, L, H, D]
    _open(out, query.shape[2])
    return out, weights


def _open(x: object, tokens: int) -> None:
    """Leaves open to the compiler the first dimension that has this many tokens, except the batch's."""
    if isinstance(x, torch.Tensor) and tokens in x.shape[1:]:
        torch._dynamo.maybe_mark_dynamic(x, 1 + x.shape[1:].index(tokens))

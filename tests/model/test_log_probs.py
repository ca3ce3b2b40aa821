"""Log-probs of a large vocabulary: how often they pass over [tokens, vocabulary]. tests/learning/test_learner.py has their
values and gradients."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl.model.log_probs import ChunkedLogProbs

N, HIDDEN, VOCABULARY = 24, 4, 101
FEW = {"aten::gather", "aten::scatter_.src"}  # touch one element of a row
NOTHING = {"aten::empty.memory_format", "aten::empty_like"}


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write of [tokens, vocabulary]: each tensor given and each one made once, views
    of it not at all, and one that an operator only fills once."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        written = [arg for arg in func._schema.arguments if arg.alias_info and arg.alias_info.is_write]
        is_view = any(of.alias_info for of in func._schema.returns) and not written
        of_itself = func.name() == "aten::copy_" and args[0] is args[1]
        if not (is_view or of_itself) and func.name() not in FEW | NOTHING:
            in_place = [arg for arg in written if not arg.kwarg_only and not func.name().startswith("aten::copy_")]
            touched = [*args, *(kwargs or {}).values(), *(args[: len(in_place)] if written else [result])]
            self.bytes += sum(x.nbytes for x in touched if isinstance(x, torch.Tensor) and x.dim() == 2 and is_logits(x))
        return result


def is_logits(x: torch.Tensor) -> bool:
    return VOCABULARY in x.shape and HIDDEN not in x.shape


@pytest.mark.parametrize(
    ("dtype", "kept", "entropy", "most"),
    [
        (torch.bfloat16, False, "none", 48),
        (torch.bfloat16, False, "metric", 64),
        (torch.bfloat16, False, "loss", 84),
        (torch.bfloat16, True, "metric", 62),
        (torch.float32, False, "none", 56),
        (torch.float32, False, "metric", 72),
        (torch.float32, True, "metric", 68),
    ],
)
def test_few_passes_over_the_logits(dtype, kept, entropy, most):
    """In bytes of an element of [tokens, vocabulary], forward and backward, at a temperature other than 1. In bfloat16: product
    2, maximum 2, shift 6, power 8, sum 4, the entropy 16; then product 2, shift 6, power 8, copy 6, two products 4."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, HIDDEN).to(dtype).requires_grad_() for size in (N, VOCABULARY))
    labels, chunk = torch.randint(VOCABULARY, (N,)), 6 * VOCABULARY
    with Traffic() as traffic:
        of = ChunkedLogProbs.apply(hidden, weight, None, labels, 0.7, entropy != "none", chunk, N * VOCABULARY * kept)
        sum(x.sum() for x in of[: 2 if entropy == "loss" else 1]).backward()
    assert 0.9 * most < traffic.bytes / (N * VOCABULARY) <= most

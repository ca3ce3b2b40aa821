"""flash-linear-attention's gated delta rule over packed rows, on an accelerator, if it is installed and right.

Its `chunk_gated_delta_rule` takes many sequences end to end, with their ends and the state that each begins with, and its
backward pass returns the gradient of these states, so that all responses to a prompt can continue one state (chain.py). It is
compared with our own rule when a learner starts, and used only if values and gradients agree. Ascend has it through Triton.

Left out: its convolution, and its rule for decoding steps, which is a single product in the embedded engine.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from rl.model.hybrid.rule import chunked
from rl.ranks.device import DELTA_RULE, is_out_of_memory

PACKAGE = "fla-core==0.6.0"
LENGTHS = (70, 1, 130, 5, 64)  # tokens of the check's sequences, around the length of a chunk
HEADS = 2
# Largest relative difference of a sequence in the check. Rounding causes 0.001 in fp16, so about 0.01 in bf16.
TOLERANCE = 0.03
INPUTS = ("queries", "keys", "values", "decay", "beta", "first states")
WHOSE = ("outputs", "final states", *(f"gradients of {x}" for x in INPUTS))


def packed_rule(q: Tensor, v: Tensor) -> Callable | None:
    """The rule for rows such as q [T, H, Dk] and v [T, H, Dv]; None if our own is used."""
    return _checked(q.device, q.dtype, q.shape[-1], v.shape[-1])[0]


def unused(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> str:
    """The reason why an accelerator computes a model's gated delta nets with our own rule; empty if it uses
    flash-linear-attention, and on a CPU."""
    return _checked(device, dtype, config.linear_key_head_dim, config.linear_value_head_dim)[1]


def choose_rule(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, say: bool) -> None:
    """At a learner's start: compiles and compares the kernels, and warns if an accelerator computes with our own rule. config:
    of the text."""
    if (why := unused(config, dtype, device)) and say:
        print(
            f"warning: flash-linear-attention is not used for the gated delta nets: {why}. In plain torch they take more than "
            "ten times as long.",
            flush=True,
        )


def recurred_by(rule: Callable, rows: Sequence[Tensor], ends: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """rows: q, k [t, H, Dk], v [t, H, Dv], decay, beta [t, H] of S sequences, ends [S + 1], start [S, H, Dk, Dv] or None for
    zeros -> (outputs [t, H, Dv], final states [S, H, Dk, Dv])."""
    how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    out, states = rule(*(x[None] for x in rows), initial_state=start, cu_seqlens=ends, **how)
    return out[0], states


@functools.cache
def _checked(device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> tuple[Callable | None, str]:
    """(the rule, or None; why it is None)."""
    if device.type not in DELTA_RULE:
        return None, ""
    if dtype not in DELTA_RULE[device.type]:
        return None, f"it is for half precision, and this is {dtype}"
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:  # not installed, or it finds no Triton or no driver
        return None, f"{_in_a_line(error)} (pip install {PACKAGE})"
    try:
        found = differences(chunk_gated_delta_rule, device, dtype, key_size, value_size)
    except Exception as error:  # of Triton on this device, or of another version
        if is_out_of_memory(error):
            raise
        return None, _in_a_line(error)
    if wrong := {what: off for what, off in found.items() if not off <= TOLERANCE}:  # also true for NaN
        what, off = next(iter(wrong.items()))
        return None, f"its {what} differ from our own by {off:.2g}, {TOLERANCE} is allowed"
    return chunk_gated_delta_rule, ""


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def differences(rule: Callable, device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> dict[str, float]:
    """For each output and gradient, the largest relative difference of a sequence between `rule` and our own in fp32."""
    tokens = sum(LENGTHS)
    generator = torch.Generator().manual_seed(0)  # a run's own numbers stay
    sizes = [(tokens, HEADS, n) for n in (key_size, key_size, value_size)] + 2 * [(tokens, HEADS)]
    of_state = (len(LENGTHS), HEADS, key_size, value_size)
    with torch.inference_mode(False), torch.enable_grad():
        q, k, v, decay, beta = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
        start, state_weight = (torch.randn(of_state, generator=generator).to(device) for _ in range(2))
        weight = torch.randn(sizes[2], generator=generator).to(device, dtype)
        made = [q, k, v, -0.1 * decay.float().sigmoid(), beta.sigmoid(), 0.3 * start]
        ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)]).to(device)
        leaves = [x.clone().requires_grad_() for x in made]
        found = recurred_by(rule, leaves[:5], ends, leaves[5])
        found = [*found, *torch.autograd.grad(found, leaves, [weight, state_weight])]
        leaves = [x.float().clone().requires_grad_() for x in made]
        right = _own(*leaves)
        right = [*right, *torch.autograd.grad(right, leaves, [weight.float(), state_weight])]
    return {what: _off(a.detach().float(), b.detach()) for what, a, b in zip(WHOSE, found, right, strict=True)}


def _own(*rows: Tensor) -> tuple[Tensor, Tensor]:
    """Our own rule on one sequence at a time."""
    *rows, start = rows
    parts = zip(*(x.split(LENGTHS) for x in rows), start.split(1), strict=True)
    outputs, states = zip(*(chunked(*(x[None] for x in of_one[:5]), of_one[5]) for of_one in parts), strict=True)
    return torch.cat([out[0] for out in outputs]), torch.cat(states)


def _off(found: Tensor, right: Tensor) -> float:
    sizes = LENGTHS if len(right) == sum(LENGTHS) else [1] * len(LENGTHS)
    pairs = zip(found.split(sizes), right.split(sizes), strict=True)
    return max((float((a - b).norm() / b.norm()) for a, b in pairs), key=lambda off: (off != off, off))  # NaN is the largest

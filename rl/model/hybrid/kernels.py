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
from rl.model.kernel_check import differences, first_wrong
from rl.ranks.device import DELTA_RULE, is_out_of_memory

PACKAGE = "fla-core==0.6.0"
LENGTHS = (70, 1, 130, 5, 64)  # tokens of the check's sequences, around the length of a chunk
HEADS = 2
OUTPUTS = ("outputs", "final states")


def packed_rule(q: Tensor, v: Tensor) -> Callable | None:
    """The rule for rows such as q [T, H, Dk] and v [T, H, Dv]; None if our own is used."""
    return _checked(q.device, q.dtype, q.shape[-1], v.shape[-1])[0]


def unused(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why an accelerator computes a model's delta nets with our own rule; empty if it does not, and on a CPU."""
    return _checked(device, dtype, config.linear_key_head_dim, config.linear_value_head_dim)[1]


def choose_rule(config: PretrainedConfig, dtype: torch.dtype, device: torch.device, say: bool) -> None:
    """Compiles and compares the kernels, and warns if an accelerator computes with our own rule. config: of the text."""
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
        why = first_wrong(compared(chunk_gated_delta_rule, device, dtype, key_size, value_size))
    except Exception as error:  # of Triton on this device, or of another version
        if is_out_of_memory(error):
            raise
        return None, _in_a_line(error)
    return None if why else chunk_gated_delta_rule, why


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def compared(rule: Callable, device: torch.device, dtype: torch.dtype, key_size: int, value_size: int) -> dict[str, float]:
    """The differences of `rule` from our own on one sequence at a time."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    sizes = [(tokens, HEADS, n) for n in (key_size, key_size, value_size)] + 2 * [(tokens, HEADS)]
    with torch.inference_mode(False):
        q, k, v, decay, beta = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
        start = 0.3 * torch.randn(len(LENGTHS), HEADS, key_size, value_size, generator=generator).to(device)
        ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)]).to(device)
        made = {"queries": q, "keys": k, "values": v, "decay": -0.1 * decay.float().sigmoid(), "beta": beta.sigmoid()}

    def kernel(*rows):
        return recurred_by(rule, rows[:5], ends, rows[5])

    def plain(*rows):
        parts = zip(*(x.split(LENGTHS) for x in rows[:5]), rows[5].split(1), strict=True)
        outputs, states = zip(*(chunked(*(x[None] for x in of_one[:5]), of_one[5]) for of_one in parts), strict=True)
        return torch.cat([out[0] for out in outputs]), torch.cat(states)

    return differences(kernel, plain, OUTPUTS, **made, first_states=start)

"""The gated delta rule (arXiv 2412.06464): in plain torch, a chunk of tokens at a time, and one token; and by
flash-linear-attention over packed rows, on an accelerator, if it is installed and right.

In plain torch states and sums are fp32, rounded where transformers rounds. The package's `chunk_gated_delta_rule` takes many
sequences end to end, with their ends and the state that each begins with, and its backward pass returns the gradient of these
states, so that all responses to a prompt can continue one state (chain.py). It is compared with the rule in plain torch when a
learner starts, and used only if values and gradients agree. Ascend has it through Triton.

Left out: the package's convolution, and its rule for decoding steps, which is a single product in the embedded engine.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from rl.model.kernel_check import differences, in_a_line, why_not
from rl.ranks.device import DELTA_RULE

CHUNK = 64  # tokens of one product, as in transformers: other borders would round differently
EPSILON = 1e-6  # in the norm of queries and keys


def chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
    """A chunk at a time: q, k [S, L, H, Dk], v [S, L, H, Dv], decay, beta [S, L, H], start [S, H, Dk, Dv]
    or None for zeros -> (outputs [S, L, H, Dv], final states [S, H, Dk, Dv])."""
    given = q.dtype
    length = q.shape[1]
    size = min(CHUNK, length)

    def cut(x: Tensor) -> Tensor:  # [S, L, H, ...] -> [S, H, chunks, size, ...]
        x = wide(x).transpose(1, 2)
        return F.pad(x, (0, 0) * (x.dim() - 3) + (0, -length % size)).unflatten(2, (-1, size))

    q, k, v, decay, beta = map(cut, (q, k, v, decay, beta))
    q = _unit(q) * q.shape[-1] ** -0.5
    k = _unit(k)
    decay = decay.cumsum(-1)  # logarithm of the part of its chunk's first state that each token leaves
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighed = k * beta[..., None]
    wanted = torch.cat([v * beta[..., None], weighed * decay.exp()[..., None]], -1)
    system = weighed @ k.transpose(-1, -2) * between  # its diagonal counts as ones
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    writes, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside, q = q @ k.transpose(-1, -2) * between, q * decay.exp()[..., None]
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    left = decay[..., -1].exp()[..., None, None]
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]) if start is None else start.to(q.dtype)
    out = []
    for n in range(q.shape[2]):
        new = writes[:, :, n] - reads[:, :, n] @ state
        out.append(q[:, :, n] @ state + inside[:, :, n] @ new)
        state = state * left[:, :, n] + k[:, :, n].transpose(-1, -2) @ new
    return torch.cat(out, 2)[:, :, :length].transpose(1, 2).to(given), state


def one_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The rule for one token of A sequences: q, k [A, H, Dk], v [A, H, Dv], decay, beta [A, H], state [A, H, Dk, Dv], which is
    changed in place -> [A, H, Dv]."""
    given = q.dtype
    q, k, v, decay, beta = map(wide, (q, k, v, decay, beta))
    q = _unit(q) * q.shape[-1] ** -0.5
    k = _unit(k)
    state.mul_(decay.exp()[..., None, None])
    new = (v - torch.einsum("ahkv,ahk->ahv", state, k)) * beta[..., None]
    state.add_(k[..., None] * new[..., None, :])
    return torch.einsum("ahkv,ahk->ahv", state, q).to(given)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --------------------------------------------------------------------------------------------- flash-linear-attention

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
        return None, f"{in_a_line(error)} (pip install {PACKAGE})"
    why = why_not(compared, chunk_gated_delta_rule, device, dtype, key_size, value_size)
    return None if why else chunk_gated_delta_rule, why


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

"""The gated delta rule (arXiv 2412.06464) in plain torch: a chunk of tokens at a time, and one token. States and sums are fp32,
rounded where transformers rounds."""

import torch
import torch.nn.functional as F
from torch import Tensor

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

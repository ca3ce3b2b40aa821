"""Digests of weights, by which generators verify that they compute with the weights that the learners sent."""

from collections.abc import Iterable

import torch
import xxhash

from rl.generation.engine import Engine
from rl.model.attention import dtype_of
from rl.ranks.device import is_accelerator


def digest(tensor: torch.Tensor, device: torch.device) -> int | torch.Tensor:
    """Return a 64-bit digest of the tensor's bits, for `read`: xxh3 on CPU machines; on accelerators a sum of the bits weighted
    by position, which they compute themselves."""
    flat = tensor.contiguous().view(-1)
    if not is_accelerator(device):
        return _signed(xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy()))
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)
    total = torch.zeros((), dtype=torch.long, device=device)
    for start in range(0, len(bits), 1 << 24):
        run = bits[start : start + (1 << 24)].to(device).long()
        position = torch.arange(start, start + len(run), device=device)
        total += (run * (position % 65_521 * 2 + 1)).sum()  # modulo 2^64
    return total


def read(digests: list[int | torch.Tensor]) -> list[int]:
    """Return digests as integers that fit into a tensor. Those on a device come in one copy: each copy waits for the device."""
    return torch.stack(digests).tolist() if digests and isinstance(digests[0], torch.Tensor) else digests


def digests_of(tensors: Iterable[torch.Tensor], device: torch.device) -> list[int]:
    """Return the digest of each tensor."""
    return read([digest(tensor, device) for tensor in tensors])


class Given:
    """The digests of the parameters that an engine with memory of its own was given, to be compared with those that it holds.
    They take -0.0 as 0.0, because an engine may hold the weights in a form that knows only one zero."""

    def __init__(self, engine: Engine, dtype: torch.dtype):
        self._engine = engine
        self._dtype = dtype
        self._digests = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        own = self._engine.own_part(name, tensor.to(dtype_of(name, self._dtype)))
        self._digests[name] = digest(own + 0.0, tensor.device)

    def check(self, version: int) -> list[str]:
        """Raise RuntimeError, with the name, if one of the engine's differs. Return the names that the engine cannot show."""
        given = dict(zip(self._digests, read([*self._digests.values()]), strict=True))
        held = {}
        for name in given:
            if (live := self._engine.read_back(name)) is not None:
                held[name] = digest(live.to(dtype_of(name, self._dtype)) + 0.0, live.device)
        for name, found in zip(held, read([*held.values()]), strict=True):
            if found != given[name]:
                raise RuntimeError(f"version {version}: the engine's {name} is not what the learner sent")
        return [name for name in given if name not in held]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value

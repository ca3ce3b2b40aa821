"""The part of a tensor that this rank holds: all of it if it learns alone, else the shard that FSDP has left it (a DTensor).
rl/ranks/gathering.py makes whole parameters of the shards of all ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor that this rank holds, in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_it_is(name: str, shard: Tensor) -> Tensor:
    return shard


def in_parts(tensors: Iterable[tuple[str, Tensor]], most: int, dtype: torch.dtype | None = None) -> Iterator[dict[str, Tensor]]:
    """Divide tensors in order into parts of at most `most` bytes in `dtype`, by default their own, or of one larger tensor."""
    part = {}
    size = 0
    for name, tensor in tensors:
        more = tensor.numel() * (dtype or tensor.dtype).itemsize
        if part and size + more > most:
            yield part
            part = {}
            size = 0
        part[name] = tensor
        size += more
    yield part


@dataclass(frozen=True)
class Block:
    """A part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Block":
        """This rank's part of the tensor."""
        if not isinstance(tensor, DTensor):
            return Block((0,) * tensor.dim(), tuple(tensor.shape))
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return Block(tuple(offset), tuple(shape))

    def slices(self) -> tuple[slice, ...]:
        """The place of this block in the whole tensor."""
        return tuple(slice(begin, begin + n) for begin, n in zip(self.offset, self.shape, strict=True))

"""The part of a tensor that this rank holds: all of it if it learns alone, else the shard that FSDP has left it (a DTensor).
rl/ranks/gathering.py makes whole parameters of the shards of all ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl.ranks.device import is_accelerator

if TYPE_CHECKING:
    from rl.ranks.pinned import PinnedBlocks


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of the tensor that this rank holds, in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def zeros_on_host(like: torch.Tensor, dtype: torch.dtype, pinned: "PinnedBlocks") -> torch.Tensor:
    """Contiguous zeros in host memory, sharded as `like` is; from `pinned` if `like` is on an accelerator."""
    # A slice of one element counts as contiguous whatever its stride, and zeros like it would keep that stride.
    place = {"dtype": dtype, "device": "cpu", "memory_format": torch.contiguous_format}
    if not is_accelerator(like.device):
        return torch.zeros_like(like, **place)
    made = torch.empty_like(like, **place)
    own = local(made)
    own.set_(pinned.zeros(own.numel(), dtype).view(own.shape))
    return made


def as_it_is(name: str, shard: torch.Tensor) -> torch.Tensor:
    return shard


@dataclass(frozen=True)
class Block:
    """A part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> "Block":
        """This rank's part of the tensor."""
        if not isinstance(tensor, DTensor):
            return Block((0,) * tensor.dim(), tuple(tensor.shape))
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return Block(tuple(offset), tuple(shape))

    def slices(self) -> tuple[slice, ...]:
        """The place of this block in the whole tensor."""
        return tuple(slice(begin, begin + n) for begin, n in zip(self.offset, self.shape, strict=True))

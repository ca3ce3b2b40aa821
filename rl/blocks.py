"""Which part of a tensor this rank holds: all of it where it learns alone, else the shard that FSDP has left it (a DTensor)."""

import json
from dataclasses import astuple, dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl.dist import all_gather_bytes


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of the tensor, in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def common(self, other: "Block") -> "Block | None":
        """What both have; None for nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.end, other.end, offset, strict=True))
        return Block(offset, shape) if min(shape, default=1) > 0 else None

    def slices(self, inside: "Block | None" = None) -> tuple[slice, ...]:
        """Where this block lies in another one, or in the whole tensor."""
        begins = [o - i for o, i in zip(self.offset, inside.offset if inside else (0,) * len(self.offset), strict=True)]
        return tuple(slice(begin, begin + n) for begin, n in zip(begins, self.shape, strict=True))


def blocks_of_all_ranks(named: dict[str, torch.Tensor]) -> list[dict[str, Block]]:
    """Of each rank: its part of each tensor, by name. A collective of all ranks."""
    own = {name: astuple(Block.of(tensor)) for name, tensor in named.items()}
    everyone = [json.loads(of_rank) for of_rank in all_gather_bytes(json.dumps(own).encode())]
    return [{name: Block(*map(tuple, block)) for name, block in of_rank.items()} for of_rank in everyone]

"""Pinned host memory for tensors that stay for the whole run, such as an offloaded optimizer's."""

import torch

BLOCK = 1 << 30  # most bytes of pinned memory allocated at once for small tensors
LEAST = 1 << 20  # smallest tensor, in bytes, that is cut out of such a block
ALIGN = 512  # bytes to which a tensor's start in a block is aligned, as torch aligns device tensors


class PinnedBlocks:
    """Pinned memory for tensors that stay for the whole run, cut out of blocks. For each pinned tensor torch allocates the next
    power of two of bytes, a third more than a matrix of 192 MB needs; a block has such a size itself."""

    def __init__(self):
        self._taken = 0  # bytes
        self._rest: list[torch.Tensor] = []  # the free part of each block

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [count] zeros in pinned memory."""
        size = count * dtype.itemsize
        room = -(-size // ALIGN) * ALIGN
        if size < LEAST:
            return _pinned(size).view(dtype)
        number = next((number for number, rest in enumerate(self._rest) if len(rest) >= room), None)
        if number is None:
            number = len(self._rest)
            self._rest.append(_pinned(1 << (max(room, min(BLOCK, self._taken)) - 1).bit_length()))
        found, self._rest[number] = self._rest[number][:size], self._rest[number][room:]
        self._taken += room
        return found.view(dtype)


def _pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

"""Host memory: zeros that take no memory, freed memory kept for the next step, and pinned memory for the whole run."""

import ctypes
import math
import mmap
import os

import torch

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # mallopt's parameters, M_... in glibc
NEVER = -1  # a value of TRIM_THRESHOLD
BLOCK = 1 << 30  # most bytes of pinned memory allocated at once for small tensors
LEAST = 1 << 20  # smallest tensor, in bytes, that is cut out of such a block
ALIGN = 512  # bytes to which a tensor's start in a block is aligned, as torch aligns device tensors


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory is allocated page by page at the first write; torch would clear all of it at once."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


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


def keep_freed() -> None:
    """Keep the memory of freed tensors from now on. Otherwise glibc would return a step's activations to the kernel, and the
    next step would allocate and clear each page again, with a fault for every 4 KB, which costs a tenth of an update. Large
    pieces are also taken from the heap, since glibc returns mapped ones when they are freed. Do nothing if malloc is not
    glibc's, or if the environment configures it."""
    said = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not said:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, NEVER)

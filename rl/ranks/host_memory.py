"""Host memory: zeros that take none, what is freed stays for the next step, and pinned memory that stays for the whole run."""

import ctypes
import math
import mmap
import os

import torch

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # glibc's names, M_..., of what mallopt sets
NEVER = -1  # as TRIM_THRESHOLD
BLOCK = 1 << 30  # bytes of pinned memory that is taken at once, where much has been taken
LEAST = 1 << 20  # bytes of a tensor that is cut out of such a block
ALIGN = 512  # bytes: where a tensor begins in it, as torch aligns those of a device


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory is taken page by page, when something is first written there: torch would clear all of it at once."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class PinnedBlocks:
    """Pinned memory for tensors that stay for the whole run, cut out of blocks. torch takes the next power of two of bytes for
    each pinned tensor, a third more than matrices of 192 MB need; a block has such a size itself."""

    def __init__(self):
        self._taken, self._rest = 0, []  # bytes; of each block what is free

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count]"""
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
    """From now on the memory of freed tensors stays with the process. glibc would hand a step's activations back to the kernel,
    and with the next step each page of them is taken again and cleared, a fault for every 4 KB: a tenth of an update. Large
    pieces, too, come from the heap then, where they stay; mapped one by one they would be gone as soon as they are freed. Does
    nothing where malloc is not glibc's, or where the environment says how it shall work."""
    said = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not said:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, NEVER)

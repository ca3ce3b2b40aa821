"""Host memory where tensors are computed on the CPU: zeros that take none, and what is freed stays for the next step."""

import ctypes
import math
import mmap
import os

import torch

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # glibc's names, M_..., of what mallopt sets
NEVER = -1  # as TRIM_THRESHOLD


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory is taken page by page, when something is first written there: torch would clear all of it at once."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


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

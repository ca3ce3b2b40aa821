"""Host memory where tensors are computed on the CPU: zeros that take none, and what is freed stays for the next step."""

import ctypes
import math
import mmap
import os

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's names, M_..., of what mallopt sets
LARGEST = 2**25  # bytes: larger pieces glibc maps one by one, whatever it is told
NEVER = 2**31 - 1  # bytes free at the heap's end before any are given back


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory is taken page by page, when something is first written there: torch would clear all of it at once."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def keep_freed() -> None:
    """From now on the memory of freed tensors stays with the process. glibc would hand a step's activations back to the kernel,
    and with the next step each page of them is taken anew and cleared, a fault for every 4 KB: a tenth of a small model's
    update. Does nothing where malloc is not glibc's, or where the environment says how it shall work."""
    said = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not said:
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, NEVER)

"""Host memory when tensors are computed on the CPU. test_engine.py checks the memory of the engine's cache."""

import ctypes

import pytest
import torch
from helpers import run_script

from rl.model import shards
from rl.ranks import pinned

TENSORS = 40
PROGRAM = f"""
import resource
import sys
import torch
from rl.ranks import device

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.empty(int(sys.argv[1]) // 4) for _ in range({TENSORS})]
    for i in range({TENSORS}):
        step[i][: 2**20].fill_(1)  # 4 MB; what is not written takes no memory
    del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

device.keep_freed()
print(*[faults() for _ in range(8)])
"""


@pytest.mark.runs
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="tells glibc's malloc")
@pytest.mark.parametrize("size", [2**22, 2**26], ids=["4 MB", "64 MB"])
def test_what_is_freed_stays_for_the_next_step_unless_the_environment_says_otherwise(tmp_path, size):
    """A step's memory is taken from the kernel once: a fault for each page, or each huge one, and none with later steps, but
    where a machine short of memory has taken pages back."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    outputs = (run_script(script, str(size), env=env).stdout for env in ({}, {"MALLOC_ARENA_MAX": "8"}))
    kept, limited = ([int(number) for number in output.split()] for output in outputs)
    assert kept[0] >= TENSORS > TENSORS // 2 > min(kept[1:])
    assert min(limited[:3]) >= TENSORS  # then glibc learns of itself, up to 32 MB


@pytest.mark.parametrize("sizes", [[192] * 60, [300, 7, 192, 2, 1100, 192, 96] * 9, [5] * 3])
def test_pinned_tensors_take_little_more_than_their_bytes(monkeypatch, sizes):
    """What torch takes on CUDA is the next power of two of each pinned tensor. sizes: in KB, of the moments of parameters."""
    taken, make, rounded = [], torch.zeros, lambda size: 1 << (size - 1).bit_length()
    monkeypatch.setattr(shards, "is_accelerator", lambda place: True)
    monkeypatch.setattr(pinned, "LEAST", 1 << 10)
    monkeypatch.setattr(pinned, "BLOCK", 1 << 20)
    monkeypatch.setattr(torch, "zeros", lambda *of, pin_memory, **how: taken.append(rounded(of[0])) or make(*of, **how))
    blocks, values = pinned.PinnedBlocks(), [torch.empty(256, size)[:, ::2].t() for size in sizes]
    dtypes = [(torch.float32, torch.uint8)[number % 2] for number in range(len(values))]
    tensors = [shards.zeros_on_host(value, dtype, blocks) for value, dtype in zip(values, dtypes, strict=True)]
    needed = sum(tensor.nbytes for tensor in tensors)
    assert sum(taken) <= min(sum(rounded(tensor.nbytes) for tensor in tensors), 1.1 * needed + pinned.BLOCK)
    for number, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
        assert tensor.shape == value.shape and tensor.is_contiguous() and not tensor.any()
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(tensors)), "two share memory"

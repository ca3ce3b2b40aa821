"""Host memory where tensors are computed on the CPU. What the engine's cache takes is in test_engine.py."""

import ctypes

import pytest
from helpers import run_script

TENSORS = 40
PROGRAM = f"""
import resource
import sys
import torch
from rl import host_memory

def tensor():
    bytes_ = torch.empty(int(sys.argv[1]), dtype=torch.uint8)
    bytes_[: 2**22] = 1  # what is not written takes no memory
    return bytes_

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [tensor() for _ in range({TENSORS})]
    del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

host_memory.keep_freed()
print(*[faults() for _ in range(8)])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="tells glibc's malloc")
@pytest.mark.parametrize("size", [2**22, 2**26], ids=["4 MB", "64 MB"])
def test_what_is_freed_stays_for_the_next_step_unless_the_environment_says_otherwise(tmp_path, size):
    """A step's memory is taken from the kernel once: a fault for each page, or each huge one, and none with later steps, but
    where a machine short of memory has taken pages back."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    outputs = (run_script(script, str(size), env=env).stdout for env in ({}, {"MALLOC_ARENA_MAX": "8"}))
    kept, told = ([int(number) for number in output.split()] for output in outputs)
    assert kept[0] >= TENSORS > TENSORS // 2 > min(kept[1:])
    assert min(told[: 2 if size < 2**25 else 8]) >= TENSORS  # up to 32 MB glibc learns of itself, in the third step or later

"""Host memory when tensors are computed on the CPU. test_engine.py checks the memory of the engine's cache."""

import ctypes

import pytest
from helpers import run_script

TENSORS = 40
PROGRAM = f"""
import resource
import sys
import torch
from rl.ranks import host_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.empty(int(sys.argv[1]) // 4) for _ in range({TENSORS})]
    for i in range({TENSORS}):
        step[i][: 2**20].fill_(1)  # 4 MB; what is not written takes no memory
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
    kept, limited = ([int(number) for number in output.split()] for output in outputs)
    assert kept[0] >= TENSORS > TENSORS // 2 > min(kept[1:])
    assert min(limited[:3]) >= TENSORS  # then glibc learns of itself, up to 32 MB

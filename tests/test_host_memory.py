"""Host memory where tensors are computed on the CPU. What the engine's cache takes is in test_engine.py."""

import ctypes

import pytest
from helpers import run_script

TENSORS = 40
PROGRAM = f"""
import resource
import torch
from rl import host_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.ones(2**20) for _ in range({TENSORS})]  # 4 MB each
    del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

host_memory.keep_freed()
print(*[faults() for _ in range(8)])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="tells glibc's malloc")
def test_what_is_freed_stays_for_the_next_step_unless_the_environment_says_otherwise(tmp_path):
    """A step's memory is taken from the kernel once: a fault for each page, or each huge one, and none with later steps, but
    where a machine short of memory has taken pages back."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    kept, told = (
        [int(number) for number in run_script(script, env=env).stdout.split()] for env in ({}, {"MALLOC_ARENA_MAX": "8"})
    )
    assert kept[0] >= TENSORS > TENSORS // 2 > min(kept[1:])
    assert min(told[:3]) >= TENSORS  # then glibc learns of itself

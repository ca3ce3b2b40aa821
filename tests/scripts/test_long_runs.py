"""A long run must not grow in memory. test_ring.py checks the ring."""

import ctypes
import gc
import itertools
import sys

import pytest
from trainer import Trainer

STEPS, PASSES, A_STEP = 20, 8, 256  # bytes that a step may leave behind


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc, over all arenas."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def bytes_in_use() -> int:
    """Return the bytes that C code, tensors and Python objects hold."""
    gc.collect()
    read = ctypes.CDLL(None).mallinfo2
    read.restype = MallocInfo
    info = read()
    return info.uordblks + info.hblkhd + 64 * sys.getallocatedblocks()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="counts with glibc's mallinfo2")
def test_the_same_steps_over_and_over_hold_no_more_memory(ranks, demo_model):
    """Twenty steps, again and again from the same weights and tickets, so that every cache is full after the first passes:
    what grows then is lost. Generation, scoring, the update and the engine's new weights."""
    trainer, held = Trainer(demo_model, ranks), []
    for _ in range(PASSES):
        trainer.ticket = 0
        trainer.begin_again()
        trainer.steps(STEPS)
        held.append(bytes_in_use())
    trainer.pool.close()
    growth = held[-1] - held[PASSES // 2]
    assert growth <= A_STEP * STEPS * (PASSES - 1 - PASSES // 2), [b - a for a, b in itertools.pairwise(held)]

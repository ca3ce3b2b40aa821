"""The report that a failing rank leaves for the other ranks."""

import sys

import pytest
from helpers import run_script
from torch.distributed import DistBackendError, DistNetworkError, HashStore

from rl.errors import RankLost, UserError
from rl.ranks import failures, process


def test_a_failure_is_reported_whatever_its_text_holds(monkeypatch):
    """A file name or a reward function's error may contain half of a surrogate pair, which the store refuses."""
    store = HashStore()
    monkeypatch.setattr(failures, "_open_store", lambda: store)
    monkeypatch.setattr(process.os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        process.fail(UserError("no reward for b\udc80r, ü"), "learner 0")
    assert failures.cause().startswith("learner 0 on ") and failures.cause().endswith(r" failed: no reward for b\udc80r, ü")


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(f"{GLOO}Connection closed by peer [127.0.0.1]:43187."), True),
        (RuntimeError(f"{GLOO}writev [127.0.0.1]:43187: Broken pipe"), True),
        (DistNetworkError("The client socket has failed to connect"), True),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RankLost("process 7 has exited"), True),
        (RuntimeError(f"{GLOO}Timed out waiting 1800000ms for recv operation to complete"), False),
        (DistBackendError("NCCL error: unhandled cuda error"), False),
        (ConnectionRefusedError("Connection refused"), False),  # of a user's own socket
        (RuntimeError("HTTPSConnectionPool: Connection to the logger timed out"), False),
        (KeyError("connection"), False),
    ],
)
def test_only_a_connection_of_the_job_means_a_lost_rank(error, expected):
    assert failures.lost_connection(error) == expected


OUT_OF_MEMORY = """
import torch
from rl.ranks import process

def log_probs():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.1 GiB")

process.run(lambda ranks: log_probs())
"""


def test_a_device_without_memory_is_one_message_with_what_to_do(tmp_path):
    script = tmp_path / "trains.py"
    script.write_text(OUT_OF_MEMORY)
    done = run_script(script, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    assert (
        "no memory left (" in done.stderr
        and "line 6, log_probs): CUDA out of memory. Tried to allocate 2.32 GiB\n" in done.stderr
    )
    for flag in ("--gradient-checkpointing", "--max-tokens-per-micro-batch", "--gpu-memory-utilization", "plan.py"):
        assert flag in done.stderr

"""Ranks, process groups and devices: the only file that knows cpu / cuda / npu and gloo / nccl / hccl.

Everything else asks this file for a device, a memory figure or a collective, and so runs unchanged on all three.
"""

import importlib.util
import os
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rl.errors import UserError

# Dense peak in bf16, FLOP/s, from the makers' data sheets; the denominator of MFU. An unknown device has none, and no MFU.
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "910B": 354e12,
}


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job. Plain `python` is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def device_type() -> str:
    """ "cuda", "npu" or "cpu": what this machine has, unless RL_DEVICE says otherwise."""
    if wanted := os.environ.get("RL_DEVICE"):
        return wanted
    if importlib.util.find_spec("torch_npu"):
        os.environ.setdefault("VLLM_ASCEND_ENABLE_NZ", "0")  # else weight updates of vllm-ascend raise
        import torch_npu  # noqa: F401  (registers the "npu" device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator and accelerator.type in ("cuda", "npu") else "cpu"


def init(timeout_minutes: float = 30) -> Ranks:
    """Joins the default process group, under torchrun or alone. CPU tensors go over gloo, device tensors over nccl / hccl."""
    kind = device_type()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[kind]
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(local_rank)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes), **alone)
    return Ranks(rank, world_size, local_rank, device)


def run(main: Callable[[Ranks], None]) -> None:
    """Runs a script's main on this rank. A UserError becomes one message (of the first rank that meets it) and exit code
    1; anything else keeps its traceback. torchrun ends the other ranks."""
    ranks = init()
    code = 0
    try:
        main(ranks)
    except UserError as error:
        code = 1
        if dist.distributed_c10d._get_default_store().add("user_error", 1) == 1:
            print(f"error: {error}", file=sys.stderr, flush=True)
    except Exception:
        code = 1
        print(f"rank {ranks.rank} failed:", file=sys.stderr)
        traceback.print_exc()
    if not code:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: on failure no destructor may wait for a rank that will never come, and on success gloo's threads now and
    # then abort while the interpreter takes itself apart.
    os._exit(code)


# ---------------------------------------------------------------------------------------------------- collectives


def all_gather_bytes(record: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank (over gloo, nothing pickled)."""
    if dist.get_world_size() == 1:
        return [record]
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(record)]))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(record)] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [g[: int(n)].numpy().tobytes() for g, n in zip(gathered, sizes, strict=True)]


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums a CPU tensor over the ranks, in place, and returns it."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    all_reduce_sum(torch.zeros(1))


# -------------------------------------------------------------------------------------------------------- devices


def synchronize() -> None:
    """Waits for the device's queued work, so that a timer measures it; nothing to do on a CPU."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def memory_gb() -> dict[str, float]:
    """Peak device memory since the last call, under verl's names; on a CPU the process's own peak (resident set)."""
    import resource

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    out = {"perf/cpu_memory_used_gb": resident}
    if device_type() != "cpu":
        out["perf/max_memory_allocated_gb"] = torch.accelerator.max_memory_allocated() / 2**30
        out["perf/max_memory_reserved_gb"] = torch.accelerator.max_memory_reserved() / 2**30
        torch.accelerator.reset_peak_memory_stats()
    return out


def device_name() -> str:
    kind = device_type()
    if kind == "cpu":
        return platform.processor() or platform.machine()
    return getattr(torch, kind).get_device_name()


def peak_flops() -> float | None:
    """The device's dense bf16 peak in FLOP/s, None where it is not known."""
    name = device_name() if device_type() != "cpu" else ""
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def describe_hardware() -> dict[str, str | int]:
    """What the run's config record says of this rank's machine."""
    return {
        "device": device_type(),
        "device_name": device_name(),
        "world_size": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "default"),
    }

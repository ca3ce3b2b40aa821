"""Ranks, process groups and devices: the only file that knows cpu / cuda / npu and gloo / nccl / hccl.

Everything else asks this file for a device, a memory figure or a collective, and so runs unchanged on all three.
"""

import contextlib
import importlib.util
import os
import platform
import sys
import time
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


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


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


@dataclass(frozen=True)
class Split:
    """This process's place in a job whose ranks are split: `ranks` counts within its role, and the default process group holds
    that role alone (vLLM makes groups out of the default group, by calls that learners would never join)."""

    role: str  # "learner" or "generator"
    ranks: Ranks
    learners: int
    generators: int
    node: int
    nodes: int
    store: dist.Store  # shared by all ranks of the job
    bridge: "Bridge | None"  # the first learner and all generators; None on other learners

    @property
    def name(self) -> str:
        return f"{self.role} {self.ranks.rank}"


class Bridge:
    """Broadcasts from the first learner to all generators, apart from both default groups."""

    def __init__(self, group, device: torch.device):
        self.group, self.device = group, device  # device: where the tensors must lie

    def broadcast(self, tensor: torch.Tensor):
        """Starts a broadcast of the contiguous tensor from the first learner; returns a handle to `wait` on."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self.group.broadcast([tensor], options)


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
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = _claim_device(local_rank)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(BACKENDS[device.type], timeout=timedelta(minutes=timeout_minutes), **alone)
    return Ranks(rank, world_size, local_rank, device)


def init_split(generators: int, timeout_minutes: float = 30) -> Split:
    """Joins this rank's role: on each node the last `generators` ranks generate, the others learn. Raises UserError where
    that leaves a role empty."""
    world, local_world = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not 0 < generators < local_world:
        raise UserError(
            f"--generators {generators} of {local_world} ranks per node leaves no {'learner' if generators else 'generator'}: "
            "start at least two with `torchrun --standalone --nproc-per-node 2 ...`."
        )
    timeout = timedelta(minutes=timeout_minutes)
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    local_rank, node, nodes = int(os.environ["LOCAL_RANK"]), rank // local_world, world // local_world
    device = _claim_device(local_rank)
    learners = local_world - generators
    role, first, per_node = ("learner", 0, learners) if local_rank < learners else ("generator", learners, generators)
    ranks = Ranks(node * per_node + local_rank - first, nodes * per_node, local_rank, device)
    dist.init_process_group(
        BACKENDS[device.type],
        store=dist.PrefixStore(role, store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
    )
    bridge = None
    if role == "generator" or ranks.is_main:
        place = 0 if role == "learner" else 1 + ranks.rank
        bridge = _make_bridge(dist.PrefixStore("bridge", store), place, 1 + nodes * generators, device, timeout)
    return Split(role, ranks, nodes * learners, nodes * generators, node, nodes, store, bridge)


def _make_bridge(store: dist.Store, place: int, size: int, device: torch.device, timeout: timedelta) -> Bridge:
    """Over nccl / hccl where each member has a device of its own, else over gloo."""
    store.set(f"device/{place}", f"{platform.node()}/{device}")
    own = len({store.get(f"device/{i}") for i in range(size)}) == size
    if device.type == "cuda" and own:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return Bridge(dist.ProcessGroupNCCL(store, place, size, options), device)
    return Bridge(dist.ProcessGroupGloo(store, place, size, timeout), torch.device("cpu"))


def _claim_device(local_rank: int) -> torch.device:
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()  # generator and learner may share the only one
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def run(main: Callable[[Ranks | Split], None], join: Callable[[], Ranks | Split] = init) -> None:
    """Runs a script's main on this rank and ends the process. The first rank that fails says why: a UserError in one
    message, anything else with its traceback; exit code 1. torchrun then ends the other ranks."""
    code = 0
    try:
        place = join()
        main(place)
        if dist.is_initialized():  # vLLM's engine destroys it when the garbage collector meets the engine
            dist.destroy_process_group()
    except KeyboardInterrupt:
        code = 130
    except UserError as error:
        code = 1
        if _first_to_fail():
            print(f"error: {error}", file=sys.stderr, flush=True)
    except Exception as error:
        code = 1
        if "onnection" in str(error):  # torchrun knows who went and why, and ends this rank before it can say less
            time.sleep(5)
        if _first_to_fail():
            name = place.name if isinstance(place, Split) else f"rank {place.rank}"
            print(f"{name} failed:", file=sys.stderr)
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: on failure no destructor may wait for a rank that will never come, and on success gloo's threads now and
    # then abort while the interpreter takes itself apart.
    os._exit(code)


def _first_to_fail() -> bool:
    """Whether no other rank of the job has failed before: what breaks in its wake would only bury the cause."""
    if "RANK" not in os.environ:
        return True
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=5)))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"failed/{attempt}", 1) == 1
    except Exception:  # the store is gone, and with it whoever could have said more
        return True


# ---------------------------------------------------------------------------------------------------- collectives


def all_gather_bytes(record: bytes) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank (over gloo, nothing pickled)."""
    if dist.get_world_size() == 1:
        return [record]
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(record)]))
    longest = int(max(sizes))
    padded = torch.frombuffer(bytearray(record.ljust(max(1, longest), b"\0")), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in sizes]
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


def side_stream(device: torch.device):
    """A context in which the device's work is queued beside the main thread's; nothing to do on a CPU."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.Stream(device)


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

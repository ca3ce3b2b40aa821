"""Ranks, process groups and devices: the only file that knows cpu / cuda / npu and gloo / nccl / hccl.

Everything else asks this file for a device, a memory figure or a collective, and so runs unchanged on all three.
"""

import contextlib
import ctypes
import faulthandler
import importlib.util
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rl import watchdog
from rl.errors import Stopped, UserError

STOP_SECONDS = 25  # from SIGTERM to the end, whatever is unfinished then: torchrun kills after 30
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


def init(hang_timeout: float = 0) -> Ranks:
    """Joins the default process group, under torchrun or alone. CPU tensors go over gloo, device tensors over nccl / hccl.
    hang_timeout: of the watchdog, in seconds; 0 for none."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = _claim_device(local_rank)
    _watch(f"rank {rank}", hang_timeout)
    with watchdog.doing("all ranks to join"):
        timeout = _limit(hang_timeout)
        store = _open_store(timeout)
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=world_size, timeout=timeout)
    show_group("all ranks", dist.group.WORLD)
    _take_signals(store)
    return Ranks(rank, world_size, local_rank, device)


def init_split(generators: int, hang_timeout: float = 0) -> Split:
    """Joins this rank's role: on each node the last `generators` ranks generate, the others learn. Raises UserError where
    that leaves a role empty. hang_timeout: of the watchdog, in seconds; 0 for none."""
    world, local_world = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not 0 < generators < local_world:
        raise UserError(
            f"--generators {generators} of {local_world} ranks per node leaves no {'learner' if generators else 'generator'}: "
            "start at least two with `torchrun --standalone --nproc-per-node 2 ...`."
        )
    timeout = _limit(hang_timeout)
    store, rank = _open_store(timeout), int(os.environ["RANK"])
    local_rank, node, nodes = int(os.environ["LOCAL_RANK"]), rank // local_world, world // local_world
    device = _claim_device(local_rank)
    learners = local_world - generators
    role, first, per_node = ("learner", 0, learners) if local_rank < learners else ("generator", learners, generators)
    ranks = Ranks(node * per_node + local_rank - first, nodes * per_node, local_rank, device)
    _watch(f"{role} {ranks.rank}", hang_timeout)
    with watchdog.doing(f"all {role}s to join"):
        dist.init_process_group(
            BACKENDS[device.type],
            store=dist.PrefixStore(role, store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timeout,
        )
    show_group(f"the {role}s", dist.group.WORLD)
    bridge = None
    if role == "generator" or ranks.is_main:
        place = 0 if role == "learner" else 1 + ranks.rank
        with watchdog.doing("the bridge's ranks to join"):
            bridge = _make_bridge(dist.PrefixStore("bridge", store), place, 1 + nodes * generators, device, timeout)
        show_group("the bridge", bridge.group)
    _take_signals(store)
    return Split(role, ranks, nodes * learners, nodes * generators, node, nodes, store, bridge)


def _watch(name: str, hang_timeout: float) -> None:
    if hang_timeout < 0:
        raise UserError(f"--hang-timeout must be 0 or more, it is {hang_timeout}.")
    if hang_timeout:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        watchdog.start(name, rank, world_size, hang_timeout, _open_store(timedelta(minutes=1)))


def _open_store(timeout: timedelta) -> dist.Store:
    """A connection to what all ranks of the job share, apart from what an attempt before torchrun's restart has left there."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _limit(hang_timeout: float) -> timedelta:
    """After which a collective fails by itself: later than the watchdog, which says more. Without one, a week."""
    return timedelta(seconds=hang_timeout + 60) if hang_timeout else timedelta(days=7)


def show_group(name: str, group: dist.ProcessGroup | dist.Backend) -> None:
    """Has the watchdog report the last collective that this rank began in the group."""
    if not isinstance(group, dist.ProcessGroup):
        watchdog.show_group(name, lambda: _last_collective(group))
        return
    backends = {backend.name(): backend for backend in map(group._get_backend, group._device_types)}
    for kind, backend in backends.items():
        own = f"{name} ({kind})" if len(backends) > 1 else name
        watchdog.show_group(own, lambda backend=backend: _last_collective(backend, group.group_name))


def _last_collective(backend, group: str = "") -> tuple[int, str]:
    """Number and name; the name is that of torch's flight recorder, and empty where there is none."""
    number = backend._get_sequence_number_for_group()
    kind = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}.get(backend.name(), "none")
    record = json.loads(getattr(torch._C._distributed_c10d, kind, lambda: "{}")()).get("entries", [])
    names = [e["profiling_name"] for e in record if e["process_group"][0] == group and e["collective_seq_id"] == number]
    return number, names[-1] if names else ""


def _make_bridge(store: dist.Store, place: int, size: int, device: torch.device, timeout: timedelta) -> Bridge:
    """Over nccl where each member has a CUDA device of its own, else over gloo."""
    store.set(f"device/{place}", f"{platform.node()}/{device}")
    own = len({store.get(f"device/{i}") for i in range(size)}) == size
    if device.type == "cuda" and own:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return Bridge(dist.ProcessGroupNCCL(store, place, size, options), device)
    return Bridge(dist.ProcessGroupGloo(store, place, size, timeout), torch.device("cpu"))


def job() -> str | None:
    """What stays the same over torchrun's restarts of this node's ranks, and is no other job's. None without torchrun."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{platform.node()}/{os.getppid()}" if "RANK" in os.environ else None


def _claim_device(local_rank: int) -> torch.device:
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()  # generator and learner may share the only one
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def run(main: Callable[[Ranks | Split], None], join: Callable[[], Ranks | Split] = init) -> None:
    """Runs a script's main on this rank and ends the process. The first rank that fails says why: a UserError in one
    message, anything else with its traceback; exit code 1. torchrun then ends the other ranks. Exit code 143 after SIGTERM.
    A crash in native code leaves every thread's Python stack."""
    faulthandler.enable()
    code = 0
    try:
        if "RANK" in os.environ:
            _die_with_parent()
        place = join()
        main(place)
        with watchdog.doing("all ranks to end"):
            if dist.is_initialized():  # vLLM's engine destroys it when the garbage collector meets the engine
                dist.destroy_process_group()
        watchdog.finish()
    except KeyboardInterrupt:
        code = 130
    except Stopped as stopped:
        code = 128 + signal.SIGTERM
        if str(stopped):
            print(stopped, file=sys.stderr, flush=True)
    except UserError as error:
        code = 1
        if _first_to_fail():
            print(f"error: {error}", file=sys.stderr, flush=True)
    except Exception as error:
        code = 1
        if stop_requested():  # the others have left already
            os._exit(128 + signal.SIGTERM)
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


def stop_requested() -> bool:
    """Whether this rank has received SIGTERM, a cluster's notice that the machine will be taken away."""
    return _sigterm.is_set()


def stopping() -> bool:
    """Whether any rank of the default group has. A collective."""
    return bool(all_reduce_sum(torch.tensor([float(stop_requested())])))


_sigterm = threading.Event()


def _take_signals(store: dist.Store) -> None:
    """From now on SIGTERM lets the script save and leave, for at most STOP_SECONDS. torchrun sends it too when a rank has
    failed; then, and when the others have left, this rank ends at once."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    first = int(os.environ.get("RANK", 0)) - int(os.environ.get("LOCAL_RANK", 0))
    store.set(f"pid/{os.environ.get('RANK', 0)}", str(os.getpid()))
    neighbours = [int(store.get(f"pid/{rank}")) for rank in range(first, first + local_world)]
    read, write = os.pipe()
    os.set_blocking(write, False)

    def watch() -> None:  # a thread, because the main one may sit in a collective that never ends
        while signal.SIGTERM not in os.read(read, 64):
            pass
        _sigterm.set()
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and all(map(_is_alive, neighbours)):
            time.sleep(0.1)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _die_with_parent() -> None:
    """A torchrun that is killed takes its ranks along (Linux), from here on and if it was killed before."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        with open("/proc/1/cmdline", "rb") as file:
            launcher = file.read()
        if os.getppid() == 1 and b"python" not in launcher and b"torch" not in launcher:  # of a container, that may be 1
            os._exit(1)


def _first_to_fail() -> bool:
    """Whether no other rank of the job has failed before: what breaks in its wake would only bury the cause."""
    try:
        return _open_store(timedelta(seconds=5)).add(watchdog.FAILED, 1) == 1
    except Exception:  # the store is gone, and with it whoever could have said more
        return True


# ---------------------------------------------------------------------------------------------------- collectives


@watchdog.doing("all_gather_bytes")
def all_gather_bytes(record: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank of the group (over gloo, nothing pickled)."""
    if dist.get_world_size() == 1:
        return [record]
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(record)]), group)
    longest = int(max(sizes))
    padded = torch.frombuffer(bytearray(record.ljust(max(1, longest), b"\0")), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group)
    return [g[: int(n)].numpy().tobytes() for g, n in zip(gathered, sizes, strict=True)]


@watchdog.doing("all_reduce_sum")
def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums a CPU tensor over the ranks, in place, and returns it."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def from_main(text: str) -> str:
    """Rank 0's text on every rank."""
    return all_gather_bytes(text.encode())[0].decode()


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

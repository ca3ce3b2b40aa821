"""The devices: the only file that distinguishes cpu, cuda and npu, and their backends (gloo, nccl, hccl).

All other files ask this one what a device can do, so they run unchanged on all three.
"""

import contextlib
import ctypes
import importlib.util
import math
import mmap
import os
import platform
import resource
import sys
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from rl.errors import UserError
from rl.ranks import host, launch

HOST = "cpu"
HOST_BACKEND = "gloo"  # of groups that send only host memory
os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")  # a rank asks the store once for all addresses
# Before torch's first attention: on the newest GPUs it prefers cuDNN's, which takes tens of milliseconds to plan each length of
# the keys, and in decoding the length grows by one each step
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
HALF = {torch.float16, torch.bfloat16}
# Kernels for attention over packed rows (rl/model/attention_kernels.py): name, precisions, most segments, largest head
PACKED_ATTENTION = {
    "cuda": ("flash", HALF, 2**31, 256),
    "npu": ("fusion", HALF | {torch.float32}, 1000, 768),
}
# Precisions in which flash-linear-attention, if installed, computes gated delta nets (rl/model/hybrid/kernels.py)
DELTA_RULE = {"cuda": HALF, "npu": HALF}
LOOPED_EXPERTS = {"npu"}  # kinds on which torch computes grouped products one after another (rl/model/grouped_experts.py)
# Dense peak in bf16, FLOP/s, from the makers' data sheets; the denominator of MFU. An unknown device has no MFU.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,  # before H100, with which its name begins
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "H20": 148e12,  # after H200, whose name begins with this one
    "910B": 354e12,
    "Ascend910_93": 376e12,  # a die: each of a chip's two dies is a device
}
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}  # a process's devices, by number or name


@cache
def kind() -> str:
    """Return the kind of this machine's devices, "cuda", "npu" or "cpu". RL_DEVICE overrides it."""
    if importlib.util.find_spec("torch_npu"):
        os.environ.setdefault("VLLM_ASCEND_ENABLE_NZ", "0")  # otherwise vllm-ascend cannot take new weights
        import torch_npu  # noqa: F401  (registers the "npu" device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = accelerator.type if accelerator and accelerator.type in BACKENDS else "cpu"
    wanted = os.environ.get("RL_DEVICE") or found
    if wanted not in ("cpu", found):
        has = "only a CPU" if found == "cpu" else f"{found} devices and the CPU"
        raise UserError(f"the environment has RL_DEVICE={wanted}, but torch finds {has} here: unset RL_DEVICE.")
    if found == "cpu" and not os.environ.get("RL_DEVICE") and launch.here().local_rank == 0:
        _warn_of_unused()
    return wanted


def _warn_of_unused() -> None:
    """Print one line if the machine has devices that torch cannot use."""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    remedies = {
        "cuda": f"torch {torch.__version__} is {built}. Check the driver with nvidia-smi, and install requirements-cuda.txt",
        "npu": "Check the driver with npu-smi info, and install requirements-npu.txt",
    }
    for of_kind in host.NODES:
        if files := host.device_files(of_kind):
            found = f"warning: {files[0]} exists, but torch finds no {of_kind} device, so this runs on the CPU. "
            print(f"{found}{remedies[of_kind]} (docs/engines.md). RL_DEVICE=cpu hides this line.", file=sys.stderr, flush=True)


def default_dtype() -> str:
    """Return the precision of --dtype auto: bfloat16 on accelerators, whose fast products and kernels need half precision."""
    return "float32" if kind() == "cpu" else "bfloat16"


def check_own(store: dist.Store, members: range, rank: int, device: torch.device, role: str) -> None:
    """Raise UserError if ranks of one role on this node share a device, since their collectives need one each. members: the
    ranks of that role on this node, each of which calls this with its own device. A launcher may show each rank only its own
    device."""
    if not is_accelerator(device):
        return
    store.set(f"device/of/{rank}", _number_in_node(device))
    count = len(set(store.multi_get([f"device/of/{member}" for member in members])))
    if count < len(members):
        raise UserError(
            f"{platform.node()} has {len(members)} {role}s and {count} {kind()} device(s) for them, and each {role} needs one "
            f"of its own. Start at most {count} here (--nproc-per-node, --generators), or set RL_DEVICE=cpu. A generator and a "
            "learner may share one."
        )


def has_accelerator() -> bool:
    """Return whether ranks of this machine compute on a GPU or an NPU."""
    return kind() != "cpu"


def claim(local_rank: int) -> torch.device:
    """Return this rank's device, which becomes the current one. Ranks share devices if there are fewer devices than ranks."""
    if kind() == "cpu":
        keep_freed()
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind(), index)


# --------------------------------------------------------------------------------------------------- what a device can do


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device has memory and queues of its own: it takes pinned host memory, and works asynchronously."""
    return device.type != "cpu"


def packed_attention(query: torch.Tensor, segments: int) -> str | None:
    """Return the device's kernel for attention over a packed row of this many segments; None if it has none."""
    if query.device.type not in PACKED_ATTENTION:
        return None
    kernel, precisions, most, size = PACKED_ATTENTION[query.device.type]
    fits = query.dtype in precisions and segments <= most and query.shape[-1] <= size and query.shape[-1] % 8 == 0
    return kernel if fits else None


def seeds_are_slow() -> bool:
    """Return whether vLLM draws the random numbers of each seed with a separate kernel, as on an NPU."""
    return kind() == "npu"


@contextlib.contextmanager
def random_numbers(device: torch.device, seed: int):
    """Let the seed determine the random numbers inside the block, on the host and on the device, but not those outside."""
    with torch.random.fork_rng([device] if is_accelerator(device) else [], device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if is_accelerator(device):
            getattr(torch, device.type).manual_seed(seed)
        yield


def moved(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor of host memory to the device. The host does not wait for the device's work."""
    return x.pin_memory().to(device, non_blocking=True) if is_accelerator(torch.device(device)) else x.to(device)


# ---------------------------------------------------------------------------------------------------------- process groups


def gathers_to_one(device: torch.device) -> bool:
    """Return whether a gather sends only to the receiving rank. HCCL's sends to all, after a pickled broadcast of shapes."""
    return device.type != "npu"


def backend(device: torch.device) -> str:
    """Return the backend of a process group of ranks on such devices. Every backend can also send host tensors."""
    return BACKENDS[device.type]


def _number_in_node(device: torch.device) -> str:
    """Return a name of the device that is unique on this machine: ranks that see one device each all call it number 0."""
    uuid = getattr(_module().get_device_properties(device), "uuid", None) if is_accelerator(device) else None
    visible = os.environ.get(VISIBLE.get(device.type, ""), "").split(",")
    index = device.index or 0
    return str(uuid or (visible[index] if index < len(visible) and visible[index] else index))


def device_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta):
    """Return a new group that sends device memory directly; None if members share a device or use the host. Collective."""
    store.set(f"device/{rank}", f"{platform.node()}/{device.type}/{_number_in_node(device)}")
    if rank == 0:  # only one rank asks for all: if each asked for all, 512 ranks would make a quarter of a million calls
        devices = store.multi_get([f"device/{i}" for i in range(size)])
        on_host = any(f"/{HOST}/".encode() in name for name in devices)
        store.set("device/own", str(int(len(set(devices)) == size and not on_host)))
    if store.get("device/own") != b"1" or not is_accelerator(device):
        return None
    if device.type == "npu":
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        group = ProcessGroupHCCL(store, rank, size, timeout=timeout)
        # Members connect at their first message, within HCCL_CONNECT_TIMEOUT (two minutes): do it now, not at the first weights
        group.broadcast([torch.zeros(1, device=device)], dist.BroadcastOptions()).wait()
        return group
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def host_group(store: dist.Store, rank: int, size: int, timeout: timedelta, at_once: int = 2):
    """Return a new group that sends host memory. timeout: for all members to join, and for each collective. at_once: the most
    collectives under way at a time; gloo lets the others wait. Collective."""
    gloo = dist.ProcessGroupGloo
    networks = os.environ.get("GLOO_SOCKET_IFNAME")
    options = gloo._Options()
    options._timeout, options._threads = timeout, at_once
    names = networks.split(",") if networks else []
    store.set_timeout(timeout)  # gloo waits for the members as long as the store does
    options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
    return gloo(store, rank, size, options)


# ---------------------------------------------------------------------------------------------------------- time and memory


@cache  # each call would return another stream, and the allocator keeps the freed memory of each stream apart
def side_stream(device: torch.device):
    """Return a context whose device work is queued separately from the main thread's; an empty context on a CPU."""
    return torch.Stream(device) if is_accelerator(device) else contextlib.nullcontext()


def _module():
    """Return torch.cuda or torch.npu, since torch.accelerator's memory functions do not know torch-npu 2.10's allocator."""
    return getattr(torch, kind())


def memory_gb() -> dict[str, float]:
    """Return the peak device memory since the last call, under verl's names, and the process's own peak (resident set)."""
    out = {"perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if kind() != "cpu":
        out["perf/max_memory_allocated_gb"] = _module().max_memory_allocated() / 2**30
        out["perf/max_memory_reserved_gb"] = _module().max_memory_reserved() / 2**30
        _module().reset_peak_memory_stats()
    return out


def empty_cache() -> None:
    """Give unused memory of the allocator back to the device, for code that does not use the allocator."""
    if kind() != "cpu":
        _module().empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that an accelerator had no room for a tensor."""
    return isinstance(error, torch.OutOfMemoryError) or "NPU out of memory" in str(error)


def synchronize() -> None:
    """Wait until this rank's accelerator, if it has one, has finished its work."""
    if kind() != "cpu":
        torch.accelerator.synchronize()


def devices_are_shared() -> bool:
    """Return whether this node has more ranks than accelerators."""
    return kind() != "cpu" and launch.here().local_world_size > torch.accelerator.device_count()


def memory_left() -> tuple[int, int] | None:
    """Return (bytes of the accelerator that new tensors may take, its total bytes); None if its driver does not know. Unused
    memory of the allocator counts as free."""
    try:
        free, total = _module().mem_get_info()
    except RuntimeError:
        return None
    return free + _module().memory_reserved() - _module().memory_allocated(), total


# ---------------------------------------------------------------------------------------------------------- host memory

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # mallopt's parameters, M_... in glibc
NEVER = -1  # a value of TRIM_THRESHOLD
BLOCK = 1 << 30  # most bytes of pinned memory allocated at once for small tensors
LEAST = 1 << 20  # smallest tensor, in bytes, that is cut out of such a block
ALIGN = 512  # bytes to which a tensor's start in a block is aligned, as torch aligns device tensors


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory is allocated page by page at the first write; torch would clear all of it at once."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class PinnedBlocks:
    """Pinned memory for tensors that stay for the whole run, cut out of blocks. For each pinned tensor torch allocates the next
    power of two of bytes, a third more than a matrix of 192 MB needs; a block has such a size itself."""

    def __init__(self):
        self._taken = 0  # bytes
        self._rest: list[torch.Tensor] = []  # the free part of each block

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [count] zeros in pinned memory."""
        size = count * dtype.itemsize
        room = -(-size // ALIGN) * ALIGN
        if size < LEAST:
            return _pinned(size).view(dtype)
        number = next((number for number, rest in enumerate(self._rest) if len(rest) >= room), None)
        if number is None:
            number = len(self._rest)
            self._rest.append(_pinned(1 << (max(room, min(BLOCK, self._taken)) - 1).bit_length()))
        found, self._rest[number] = self._rest[number][:size], self._rest[number][room:]
        self._taken += room
        return found.view(dtype)


def _pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


def keep_freed() -> None:
    """Keep the memory of freed tensors from now on. Otherwise glibc would return a step's activations to the kernel, and the
    next step would allocate and clear each page again, with a fault for every 4 KB, which costs a tenth of an update. Large
    pieces are also taken from the heap, since glibc returns mapped ones when they are freed. Do nothing if malloc is not
    glibc's, or if the environment configures it."""
    said = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not said:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, NEVER)


# ------------------------------------------------------------------------------------------------------------------- facts


def name() -> str:
    """Return the device's model name, as given by its driver or the system."""
    if kind() == "cpu":
        return platform.processor() or platform.machine()
    return _module().get_device_name()


def peak_flops() -> float | None:
    """Return the device's dense bf16 peak in FLOP/s; None if it is unknown."""
    if kind() == "cpu":
        return None
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name()), None)

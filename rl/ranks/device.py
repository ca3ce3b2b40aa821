"""The devices: with device_groups.py the only file that distinguishes cpu, cuda and npu, and their backends (gloo, nccl, hccl).

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
from functools import cache

import torch

from rl.errors import UserError
from rl.ranks import host, launch

HOST = "cpu"
HOST_BACKEND = "gloo"  # of groups that send only host memory
os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")  # a rank asks the store once for all addresses
# Before torch's first attention: on the newest GPUs it prefers cuDNN's, which takes tens of milliseconds to plan each length of
# the keys, and in decoding the length grows by one each step
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
# of process groups of ranks on such devices; all can also send host tensors
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
HALF = {torch.float16, torch.bfloat16}
# Kernels for attention over packed rows (rl/model/attention_kernels.py): name, precisions, most segments, largest head
PACKED_ATTENTION = {"cuda": ("flash", HALF, 2**31, 256), "npu": ("fusion", HALF | {torch.float32}, 1000, 768)}
# Precisions in which flash-linear-attention, if installed, computes gated delta nets (rl/model/hybrid/rule.py)
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


# ---------------------------------------------------------------------------------------------------------- time and memory


@cache  # each call would return another stream, and the allocator keeps the freed memory of each stream apart
def side_stream(device: torch.device):
    """Return a context whose device work is queued separately from the main thread's; an empty context on a CPU."""
    return torch.Stream(device) if is_accelerator(device) else contextlib.nullcontext()


def module():
    """Return torch.cuda or torch.npu, since torch.accelerator's memory functions do not know torch-npu 2.10's allocator."""
    return getattr(torch, kind())


def memory_gb() -> dict[str, float]:
    """Return the peak device memory since the last call, under verl's names, and the process's own peak (resident set)."""
    out = {"perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if kind() != "cpu":
        out["perf/max_memory_allocated_gb"] = module().max_memory_allocated() / 2**30
        out["perf/max_memory_reserved_gb"] = module().max_memory_reserved() / 2**30
        module().reset_peak_memory_stats()
    return out


def empty_cache() -> None:
    """Give unused memory of the allocator back to the device, for code that does not use the allocator."""
    if kind() != "cpu":
        module().empty_cache()


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


# ---------------------------------------------------------------------------------------------------------- host memory

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # mallopt's parameters, M_... in glibc
NEVER = -1  # a value of TRIM_THRESHOLD


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose memory is allocated page by page at the first write; torch would clear all of it at once."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


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
    return module().get_device_name()


def peak_flops() -> float | None:
    """Return the device's dense bf16 peak in FLOP/s; None if it is unknown."""
    if kind() == "cpu":
        return None
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name()), None)

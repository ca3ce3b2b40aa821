"""Ranks, their process groups, and what they send each other."""

import os
import platform
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rl import device, signals, watchdog
from rl.errors import UserError


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

    @property
    def name(self) -> str:
        return f"rank {self.rank}"


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


def init(hang_timeout: float = 0) -> Ranks:
    """Joins the default process group, under torchrun or alone. CPU tensors go over gloo, device tensors over nccl / hccl.
    hang_timeout: of the watchdog, in seconds; 0 for none."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    own_device = device.claim(local_rank)
    _watch(f"rank {rank}", hang_timeout)
    with watchdog.doing("all ranks to join"):
        timeout = _limit(hang_timeout)
        store = open_store(timeout)
        dist.init_process_group(device.backend(own_device), store=store, rank=rank, world_size=world_size, timeout=timeout)
    show_group("all ranks", dist.group.WORLD)
    signals.stop_gently(_neighbours(store))
    return Ranks(rank, world_size, local_rank, own_device)


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
    store, rank = open_store(timeout), int(os.environ["RANK"])
    local_rank, node, nodes = int(os.environ["LOCAL_RANK"]), rank // local_world, world // local_world
    own_device = device.claim(local_rank)
    learners = local_world - generators
    role, first, per_node = ("learner", 0, learners) if local_rank < learners else ("generator", learners, generators)
    ranks = Ranks(node * per_node + local_rank - first, nodes * per_node, local_rank, own_device)
    _watch(f"{role} {ranks.rank}", hang_timeout)
    with watchdog.doing(f"all {role}s to join"):
        dist.init_process_group(
            device.backend(own_device),
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
            bridge_store = dist.PrefixStore("bridge", store)
            bridge = Bridge(*device.broadcast_group(bridge_store, place, 1 + nodes * generators, own_device, timeout))
        show_group("the bridge", bridge.group)
    signals.stop_gently(_neighbours(store))
    return Split(role, ranks, nodes * learners, nodes * generators, node, nodes, store, bridge)


def _watch(name: str, hang_timeout: float) -> None:
    if hang_timeout:
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        watchdog.start(name, rank, world_size, hang_timeout, open_store(timedelta(minutes=1)))


def open_store(timeout: timedelta) -> dist.Store:
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
    record = device.flight_record(backend.name())
    names = [e["profiling_name"] for e in record if e["process_group"][0] == group and e["collective_seq_id"] == number]
    return number, names[-1] if names else ""


def job() -> str | None:
    """What stays the same over torchrun's restarts of this node's ranks, and is no other job's. None without torchrun."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{platform.node()}/{os.getppid()}" if "RANK" in os.environ else None


def _neighbours(store: dist.Store) -> list[int]:
    """The processes of this node's ranks."""
    rank, first = int(os.environ.get("RANK", 0)), int(os.environ.get("RANK", 0)) - int(os.environ.get("LOCAL_RANK", 0))
    store.set(f"pid/{rank}", str(os.getpid()))
    return [int(store.get(f"pid/{i}")) for i in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))]


def launched_ranks() -> int:
    """Ranks of the job, before they have joined: 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def stopping() -> bool:
    """Whether any rank of the default group has been told to stop (SIGTERM). A collective."""
    return bool(all_reduce_sum(torch.tensor([float(signals.stop_requested())])))


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


def describe_hardware() -> dict[str, str | int]:
    """What the run's config record says of this rank's machine."""
    return {
        "device": device.kind(),
        "device_name": device.name(),
        "world_size": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "default"),
    }

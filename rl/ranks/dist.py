"""Ranks, their process groups, and what they send each other."""

import contextlib
import json
import os
import platform
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.ranks import device, heartbeat, launch, signals, streams, watchdog

SHARED_SECONDS = 10  # network file systems list new files late, but find those that are asked for by name at once


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job. Plain `python` is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    sequence_parallel: int = 1  # neighbours that share the sequences of a micro-batch (rl/model/sequence_parallel.py)
    expert_parallel: int = 1  # neighbours that share the experts (rl/model/expert_parallel.py)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    @property
    def data_rank(self) -> int:
        """Whose micro-batches this rank computes, alone or with its neighbours."""
        return self.rank // self.sequence_parallel

    @property
    def data_size(self) -> int:
        """How many ranks, or groups of neighbours, the micro-batches are divided among."""
        return self.world_size // self.sequence_parallel

    @cached_property
    def sequence_mesh(self) -> DeviceMesh:
        """All ranks as "data" by "sequence". A collective when it is first asked for."""
        shape, names = (self.data_size, self.sequence_parallel), ("data", "sequence")
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        show_group("the ranks of a sequence", mesh.get_group("sequence"))
        show_group("the groups of a sequence's ranks", mesh.get_group("data"))
        return mesh

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """All ranks as "shard" by "expert". A collective when it is first asked for."""
        shape, names = (self.world_size // self.expert_parallel, self.expert_parallel), ("shard", "expert")
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        show_group("the ranks of the experts", mesh.get_group("expert"))
        show_group("the ranks of the same experts", mesh.get_group("shard"))
        return mesh

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Ranks that together hold each micro-batch once: what sums over the batch go over. None for all ranks."""
        return self.sequence_mesh.get_group("data") if self.sequence_parallel > 1 else None

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks of the default process group as the model is sharded over them: along "data". A collective when it is first
        asked for."""
        return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("data",))


def init(hang_timeout: float = 0, node_timeout: float = 0) -> Ranks:
    """Joins the default process group, under torchrun or alone. CPU tensors go over gloo, device tensors over nccl / hccl.
    hang_timeout, node_timeout: of the watchdog and the heartbeat, in seconds; 0 for none."""
    here = launch.here()
    own_device, timeout = device.claim(here.local_rank), time_limit(hang_timeout)
    store = launch.join(timeout)
    watch(f"rank {here.rank}", hang_timeout)
    with watchdog.doing("all ranks to join"):
        launch.exchange_nodes(store, generators=0)
        device.check_own(store, range(here.first, here.first + here.local_world_size), here.rank, own_device, "rank")
        take_name(f"rank {here.rank}")
        heartbeat.start(node_timeout)
        backend = device.backend(own_device)
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world_size, timeout=timeout)
    show_group("all ranks", dist.group.WORLD)
    launch.stop_on_sigterm(store)
    return Ranks(here.rank, here.world_size, here.local_rank, own_device)


def join(args) -> Ranks:
    """`init` with the limits that a script's flags name."""
    return init(args.hang_timeout, args.node_timeout)


def take_name(name: str) -> None:
    """Names this process in what it reports, with its machine where there are several."""
    watchdog.rename(name)
    heartbeat.rename(name)
    if len(launch.nodes()) > 1:
        streams.sign_errors(f"{platform.node()} {name}")


def watch(name: str, hang_timeout: float) -> None:
    if hang_timeout:
        here, store = launch.here(), launch.open_store(timedelta(minutes=1))
        watchdog.start(name, here.rank, here.world_size, hang_timeout, store)


def time_limit(hang_timeout: float) -> timedelta:
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


def stopping() -> bool:
    """True if any rank of the default group has been asked to stop (SIGTERM). A collective."""
    return bool(all_reduce_sum(torch.tensor([float(signals.stop_requested())])))


def engines_first(role: str) -> None:
    """Where generators and learners share this node's devices: a generator reports that its engine has started, and a learner
    returns when all engines here have. An engine counts memory that is taken while it starts as its own."""
    here = launch.here()
    node = next((node for node in launch.nodes() if node.first == here.first), None)
    shares = node and node.generators and node.learners
    if not shares or not device.devices_are_shared():
        return
    engines = [f"engine/{here.first}/{rank}" for rank in range(node.learners, node.size)]
    store = launch.open_store(timedelta(days=7))
    if role == "generator":
        store.set(f"engine/{here.first}/{here.local_rank}", "started")
        return
    with watchdog.doing("the engines on this node's devices to start"):
        store.wait(engines)


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


def all_gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's value, in rank order, on every rank of the group. JSON carries it: a tuple arrives as a list."""
    return [json.loads(record) for record in all_gather_bytes(json.dumps(value).encode(), group)]


@watchdog.doing("all_reduce_sum")
def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sums a tensor over the ranks of the group, by default all, in place, and returns it."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


class AllToAll(torch.autograd.Function):
    """(x [R, ...], rows to send to each rank of the group, rows to receive from each, group) -> [R', ...] in rank order. The
    gradient goes back the same way."""

    @staticmethod
    def forward(ctx, x, sent: list[int], received: list[int], group: dist.ProcessGroup):
        ctx.rows = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        with watchdog.doing("all_to_all"):
            dist.all_to_all_single(out, x.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received, group = ctx.rows
        return AllToAll.apply(grad, received, sent, group), None, None, None


def from_main(value: Any) -> Any:
    """Rank 0's value on every rank. JSON carries it: a tuple arrives as a list."""
    return json.loads(bytes_from_main(json.dumps(value).encode()))


@watchdog.doing("the first rank's word")
def bytes_from_main(data: bytes) -> bytes:
    """Rank 0's bytes on every rank."""
    if dist.get_world_size() == 1:
        return data
    is_main = dist.get_rank() == 0
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0)
    record = torch.frombuffer(bytearray(data + b"." if is_main else int(size) + 1), dtype=torch.uint8)  # one may be empty
    dist.broadcast(record, src=0)
    return data if is_main else record.numpy()[:-1].tobytes()


def sees_main(directory: Path) -> bool:
    """False if this rank's machine has another directory there than rank 0's, which has made its own; it is then made, too, if
    that can be. A collective of the default group."""
    if len(launch.nodes()) <= 1:
        return True
    name = from_main(f".seen-by-all-nodes-{os.urandom(8).hex()}")
    is_main = dist.get_rank() == 0
    if is_main:
        (directory / name).touch()
    barrier()
    deadline = time.monotonic() + SHARED_SECONDS
    with contextlib.suppress(OSError):  # asks the server, where a network file system remembers that there was none
        directory.mkdir(parents=True, exist_ok=True)
    with watchdog.doing("what the first node writes to show here"):
        while not (seen := (directory / name).exists()) and time.monotonic() < deadline:
            time.sleep(0.2)
    barrier()
    if is_main:
        (directory / name).unlink()
    return seen


def barrier() -> None:
    all_reduce_sum(torch.zeros(1))


def describe_hardware() -> dict[str, str | int | list]:
    """This rank's machine and the layout of the job, for the run's config record."""
    return {
        "device": device.kind(),
        "device_name": device.name(),
        "world_size": dist.get_world_size(),
        "layout": launch.layout(),
        "threads_per_rank": torch.get_num_threads(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "default"),
    }

"""Ranks, their process groups and their collectives."""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.errors import UserError
from rl.ranks import device, launch, stops, watchdog

SHARED_SECONDS = 10  # network file systems list new files late, but find a file by name at once


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
        """The number of this rank, or of its group of neighbours, among those that share the micro-batches."""
        return self.rank // self.sequence_parallel

    @property
    def data_size(self) -> int:
        """The number of ranks, or groups of neighbours, that share the micro-batches."""
        return self.world_size // self.sequence_parallel

    def _new_mesh(self, **sizes: int) -> DeviceMesh:
        return init_device_mesh(self.device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))

    @cached_property
    def sequence_mesh(self) -> DeviceMesh:
        """All ranks as "data" by "sequence". The first access is a collective."""
        return self._new_mesh(data=self.data_size, sequence=self.sequence_parallel)

    @cached_property
    def expert_mesh(self) -> DeviceMesh:
        """All ranks as "shard" by "expert". The first access is a collective."""
        return self._new_mesh(shard=self.world_size // self.expert_parallel, expert=self.expert_parallel)

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that together hold each micro-batch once, for sums over the batch; None if these are all ranks."""
        return self.sequence_mesh.get_group("data") if self.sequence_parallel > 1 else None

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks along "data", over which the model is sharded. The first access is a collective."""
        return self._new_mesh(data=self.world_size)


def init(hang_timeout: float = 0) -> Ranks:
    """Join the default process group, under torchrun or as the only rank. gloo sends CPU tensors; nccl or hccl sends device
    tensors. hang_timeout: seconds, of the watchdog; 0 turns it off. Collective."""
    store, own_device, timeout = meet(0, hang_timeout)
    here = launch.here()
    if device.is_accelerator(own_device):
        from rl.ranks.device_groups import check_own  # late: a CPU is shared

        check_own(store, range(here.first, here.first + here.local_world_size), here.rank, own_device, "rank")
    backend = device.BACKENDS[own_device.type]
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world_size, timeout=timeout)
    return Ranks(here.rank, here.world_size, here.local_rank, own_device)


def join(args) -> Ranks:
    """Call `init` with the timeout of a script's flags. Raise UserError if its schedule splits the ranks."""
    if args.schedule.split:
        raise UserError(
            f"the script does not split the ranks, and its Args have {type(args.schedule).__name__}, which does: write the "
            "schedule of the script that it was copied from into them."
        )
    return init(args.hang_timeout)


def meet(generators: int, hang_timeout: float) -> tuple[dist.Store, torch.device, timedelta]:
    """Wait for all ranks of the job. Return the store that all share, this rank's device, and the timeout of a collective.
    generators: number on this node. Collective."""
    own_device = device.claim(launch.here().local_rank)
    timeout = timedelta(seconds=hang_timeout + 60) if hang_timeout else timedelta(days=7)  # the watchdog is first: it says more
    store = launch.join(timeout)
    watchdog.start(hang_timeout)
    launch.exchange_nodes(store, generators)
    return store, own_device, timeout


def stopping() -> bool:
    """Return whether the job is asked to stop, and a rank of the default group knows it (SIGTERM to any rank). Collective."""
    return bool(all_reduce_sum(torch.tensor([float(stops.stop_requested())])))


# ---------------------------------------------------------------------------------------------------- collectives


def all_gather_bytes(record: bytes, group: dist.ProcessGroup | None = None) -> list[bytearray]:
    """Return every rank's bytes, in rank order, on every rank of the group. Collective."""
    if dist.get_world_size(group) == 1:
        return [bytearray(record)]
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(record)]), group)
    parts = [bytearray(record) if rank == dist.get_rank(group) else bytearray(int(size)) for rank, size in enumerate(sizes)]
    broadcast_parts(parts, group)
    return parts


def broadcast_parts(parts: list[bytearray], group: dist.ProcessGroup | None) -> None:
    """Fill each part with the bytes of its rank; parts are in rank order. Collective."""
    tensors = {rank: torch.frombuffer(part, dtype=torch.uint8) for rank, part in enumerate(parts) if part}
    for sent in [dist.broadcast(x, group=group, async_op=True, group_src=rank) for rank, x in tensors.items()]:
        sent.wait()


def all_gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list:
    """Return every rank's value, in rank order, on every rank. Values are sent as JSON, for torch's own object collectives
    unpickle what they receive: tuples arrive as lists. Collective."""
    return [json.loads(record) for record in all_gather_bytes(json.dumps(value).encode(), group)]


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum a tensor in place over the ranks of the group, by default all, and return it. Collective."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def from_main(value: Any) -> Any:
    """Return rank 0's value on every rank. It is sent as JSON: a tuple arrives as a list. Collective."""
    return all_gather_values(value if dist.get_rank() == 0 else None)[0]


def sees_main(directory: Path) -> bool:
    """Return whether this rank sees the directory that rank 0 has made. If it does not, try to make it here. Collective."""
    if len(launch.nodes()) <= 1:
        return True
    name = from_main(f".seen-by-all-nodes-{os.urandom(8).hex()}")
    is_main = dist.get_rank() == 0
    if is_main:
        (directory / name).touch()
    barrier()
    deadline = time.monotonic() + SHARED_SECONDS
    with contextlib.suppress(OSError):  # this also makes a network file system query its server again
        directory.mkdir(parents=True, exist_ok=True)
    while not (seen := (directory / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    barrier()
    if is_main:
        (directory / name).unlink()
    return seen


def barrier() -> None:
    all_reduce_sum(torch.zeros(1))


def describe_hardware() -> dict[str, str | int | list]:
    """Return this rank's machine and the layout of the job, for the run's config.json."""
    return {
        "device": device.kind(),
        "device_name": device.name(),
        "world_size": dist.get_world_size(),
        "layout": launch.layout(),
        "threads_per_rank": torch.get_num_threads(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "default"),
    }

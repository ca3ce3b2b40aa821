"""This process's launch, the nodes of its job, and the store through which all ranks of the job meet."""

import json
import os
import platform
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rl.errors import UserError

SHORT = timedelta(seconds=8)  # more than the 5 s by which an unresponsive name server delays a connection to torch's store


@dataclass(frozen=True)
class Launch:
    """This process as described by torchrun or `accelerate launch`; plain `python` is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    restarts: int  # how often torchrun has restarted this node's ranks

    @property
    def first(self) -> int:
        """The lowest rank of this node."""
        return self.rank - self.local_rank


def check() -> None:
    """Raise UserError if the environment has only some of torchrun's variables: every process would be the only rank."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in needed if name in os.environ]
    missing = [name for name in needed if name not in given]
    if missing and not {*given} <= {"MASTER_ADDR", "MASTER_PORT"}:
        raise UserError(
            f"the environment has {', '.join(given)} and lacks {', '.join(missing)}. Start with torchrun, which sets all, or "
            f"unset {', '.join(given)}."
        )


def here() -> Launch:
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
    return Launch(*(int(os.environ.get(name, default)) for name, default in names.items()))


# ---------------------------------------------------------------------------------------------------------------- nodes


@dataclass(frozen=True)
class Node:
    """One machine of the job."""

    host: str
    first: int  # the lowest of its ranks
    size: int  # number of its ranks
    generators: int  # number of generators: its last ranks

    @property
    def learners(self) -> int:
        return self.size - self.generators

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.size)

    def __str__(self) -> str:
        return f"{self.host} has {self.size} ranks, {self.generators} of them generators"


_nodes: list[Node] = []
neighbours: dict[int, int] = {}  # process ids of this node's ranks, by rank; none before all have joined


def nodes() -> list[Node]:
    """Return all nodes of the job, in order of their ranks; none before they have met."""
    return _nodes


def layout() -> list[dict]:
    """Return each node's host, and the role of each rank: "learner 0", "generator 3", or "rank 1" if every rank is both."""
    split = any(node.generators for node in _nodes)
    numbers = Counter()
    out = []
    for node in _nodes:
        roles = ["learner"] * node.learners + ["generator"] * node.generators if split else ["rank"] * node.size
        names = {}
        for rank, role in zip(node.ranks, roles, strict=True):
            names[str(rank)] = f"{role} {numbers[role]}"
            numbers[role] += 1
        out.append({"host": node.host, "ranks": names})
    return out


def place(rank: int | None = None, pid: int | None = None) -> str:
    """Return the name of a rank, by default this one's, for messages: "rank 1" or "generator 0 (rank 1)", with its process if
    `pid` is given, and with its host if there are several nodes."""
    rank = here().rank if rank is None else rank
    node, name = next(
        ((node["host"], node["ranks"][str(rank)]) for node in layout() if str(rank) in node["ranks"]), ("", f"rank {rank}")
    )
    details = ", ".join([f"rank {rank}"] * (name != f"rank {rank}") + [f"process {pid}"] * (pid is not None))
    return name + (f" ({details})" if details else "") + (f" on {node}" if len(_nodes) > 1 else "")


def exchange_nodes(store: dist.Store, generators: int) -> None:
    """Exchange the nodes of all ranks; print a line per node. Raise UserError if the store is another job's. Collective."""
    me = here()
    if me.rank == 0:
        store.set("world_size", str(me.world_size))
    if (world := int(store.get("world_size"))) != me.world_size:
        raise UserError(
            f"rank {me.rank} is one of {me.world_size}, but the job it has reached has {world} ranks: give all nodes of a "
            "job the same --nnodes, and each job a --rdzv-endpoint (or MASTER_PORT) of its own."
        )
    if me.local_rank == 0:
        store.set(f"node/{me.rank}", json.dumps([platform.node(), me.rank, me.local_world_size, generators]))
    if me.rank == 0:
        found = []
        met = 0
        while met < world:
            found.append(json.loads(store.get(f"node/{met}")))
            met += Node(*found[-1]).size
        store.set("nodes", json.dumps(found))
    _nodes[:] = [Node(*node) for node in json.loads(store.get("nodes"))]
    if len(_nodes) > 1 and me.local_rank == 0:
        number = [node.first for node in _nodes].index(me.rank) + 1
        last = me.rank + me.local_world_size - 1
        ranks = f"ranks {me.rank} to {last}" if last > me.rank else f"rank {me.rank}"
        first = next((n for n, node in enumerate(_nodes, 1) if node.learners), number)  # no learner: refused later
        where = "" if number == first else f"; the run's messages appear on node {first}, {_nodes[first - 1].host}"
        print(f"node {number} of {len(_nodes)}, {platform.node()}: {ranks} of {world}{where}", flush=True)


def exchange_processes(store: dist.Store) -> None:
    """Exchange the process ids of this node's ranks. A collective of the node's ranks."""
    me = here()
    store.set(f"pid/{me.rank}", str(os.getpid()))
    neighbours.update({rank: int(store.get(f"pid/{rank}")) for rank in range(me.first, me.first + me.local_world_size)})


def is_alive(pid: int) -> bool:
    """Return whether this process of this machine is running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------------------- store

_start: int | None = None  # the number of earlier starts of all ranks
_of_one: dist.Store = dist.HashStore()  # of plain python
_served: dist.Store | None = None  # keeps the store where rank 0 itself serves it, without torchrun's agent


def join(timeout: timedelta) -> dist.Store:
    """Wait for the job's store, and return a connection to it without the keys of earlier starts. If torchrun restarts several
    nodes, it counts the restart on the failed one only, so the ranks count themselves."""
    global _start, _of_one, _served
    me = here()
    _of_one = dist.HashStore()
    alone = me.local_world_size == me.world_size
    _served = None if alone else _base_store(timeout)
    _start = me.restarts if alone else (_served.add("arrived", 1) - 1) // me.world_size
    return open_store(timeout)


def restarts() -> int:
    """Return how often torchrun has restarted all ranks of the job."""
    return here().restarts if _start is None else _start


def open_store(timeout: timedelta = SHORT) -> dist.Store:
    """Return a connection to the store of this start. Raise DistError before `join`, or if the store is lost."""
    if "RANK" not in os.environ:
        return _of_one
    if _start is None:
        raise dist.DistError("the ranks have not met yet")
    return dist.PrefixStore(f"start/{_start}", _base_store(timeout))


def _base_store(timeout: timedelta) -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return store


def job() -> str | None:
    """Return a unique identifier that survives torchrun's restarts of this node's ranks; None without torchrun."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{platform.node()}/{os.getppid()}" if "RANK" in os.environ else None

"""This process's launch, the nodes of its job, and the store through which all ranks of the job meet."""

import json
import os
import platform
import secrets
import time
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
    """Raise UserError if the environment has only some of torchrun's variables: this process would wait for ranks that do not
    exist, or take itself for the only one."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ[name] for name in (*needed, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ}
    if given.keys() <= {"MASTER_ADDR", "MASTER_PORT"}:  # plain python
        return
    if missing := [name for name in needed if name not in given]:
        raise UserError(
            f"the environment has {', '.join(given)} and lacks {', '.join(missing)}. Start with torchrun, which sets all, or "
            f"unset {', '.join(given)}."
        )
    if wrong := [f"{name}={value!r}" for name, value in given.items() if name != "MASTER_ADDR" and not value.isdecimal()]:
        raise UserError(f"{wrong[0]} in the environment is no number. Start with torchrun, which sets it, or unset it.")
    me = here()
    if not me.local_rank <= me.rank < me.world_size:
        raise UserError(
            f"the environment says rank {me.rank} of {me.world_size}, on its node {me.local_rank}. Start with torchrun."
        )


def here() -> Launch:
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
    return Launch(*(int(os.environ.get(name, default)) for name, default in names.items()))


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
_neighbours: dict[int, int] = {}


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


def neighbours() -> dict[int, int]:
    """Return the process ids of this node's ranks, by rank; none before all have joined."""
    return _neighbours


def exchange_nodes(store: dist.Store, generators: int) -> None:
    """Exchange the nodes of all ranks; print a line per node. Raise UserError if the store is another job's. Collective."""
    me = here()
    if me.rank == 0:
        store.set("world_size", str(me.world_size))
    _check_world(world := int(store.get("world_size")), me)
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


_start: tuple[str, int] | None = None  # a unique name of this start of all ranks, and the number of earlier ones
_of_one: dist.Store = dist.HashStore()  # of plain python


def join(timeout: timedelta) -> dist.Store:
    """Wait for all ranks of this start, and return a connection to the store that they share from then on.

    If several nodes are restarted, torchrun gives them different restart counts (only the failed node's increases), and the
    store still holds keys of the last start. So each rank leaves a unique word, rank 0 gathers the words into a proposal, and
    the first proposal that all of its ranks have confirmed counts."""
    global _start, _of_one
    me = here()
    _of_one = dist.HashStore()
    if me.local_world_size == me.world_size:  # a single torchrun, so a single count
        _start = str(me.restarts), me.restarts
    else:
        _start = _agree(_base_store(timeout), me)
    return open_store(timeout)


def _agree(store: dist.Store, me: Launch) -> tuple[str, int]:
    own = [secrets.token_hex(8), me.restarts]
    proposal = None
    store.set(f"starts/{me.rank}", json.dumps(own))
    before = store.add("starts", 1) - 1 if me.rank == 0 else 0
    confirmed = set()  # names of proposals
    while True:
        if me.rank == 0:
            found = [json.loads(store.get(f"starts/{rank}")) for rank in range(me.world_size)]
            if proposal is None or proposal["ranks"] != found:
                restarts = max(before, *(count for _, count in found))
                proposal = {"name": secrets.token_hex(8), "restarts": restarts, "ranks": found}
                store.set("start", json.dumps(proposal))
        else:
            proposal = json.loads(store.get("start"))
            _check_world(len(proposal["ranks"]), me)
        name = proposal["name"]
        if proposal["ranks"][me.rank] == own:
            count = store.add(f"confirmed/{name}", name not in confirmed)
            confirmed.add(name)
            if count == me.world_size:
                return name, proposal["restarts"]
        time.sleep(0.05)


def _check_world(world: int, me: Launch) -> None:
    """Raise UserError unless the job that this rank has reached is its own. world: number of ranks of that job."""
    if world != me.world_size:
        raise UserError(
            f"rank {me.rank} is one of {me.world_size}, but the job it has reached has {world} ranks: give all nodes of a "
            "job the same --nnodes, and each job a --rdzv-endpoint (or MASTER_PORT) of its own."
        )


def restarts() -> int:
    """Return how often torchrun has restarted all ranks of the job."""
    return _start[1] if _start else here().restarts


def open_store(timeout: timedelta = SHORT) -> dist.Store:
    """Return a connection to the store of this start, without the keys of earlier starts. Raise DistError before `join`."""
    if "RANK" not in os.environ:
        return _of_one
    if not _start:
        raise dist.DistError("the ranks have not met yet")
    return dist.PrefixStore(f"start/{_start[0]}", _base_store(timeout))


def _base_store(timeout: timedelta) -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return store


def job() -> str | None:
    """Return a unique identifier that survives torchrun's restarts of this node's ranks; None without torchrun."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{platform.node()}/{os.getppid()}" if "RANK" in os.environ else None


def exchange_processes(store: dist.Store) -> None:
    """Exchange the process ids of this node's ranks. A collective of the node's ranks."""
    me = here()
    store.set(f"pid/{me.rank}", str(os.getpid()))
    _neighbours.update({rank: int(store.get(f"pid/{rank}")) for rank in range(me.first, me.first + me.local_world_size)})


def is_alive(pid: int) -> bool:
    """Return whether this process of this machine is running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

"""The split of the ranks into generators and learners, and the connections between the two."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from rl.errors import UserError
from rl.ranks import device, launch
from rl.ranks.device_groups import check_own
from rl.ranks.dist import Ranks, meet
from rl.transport.bridge import Bridge, senders


@dataclass(frozen=True)
class Split:
    """This process's place in a job whose ranks are split. `ranks` counts within its role, and the default process group has
    only ranks of that role (vLLM derives groups from the default group, in calls that learners would never join)."""

    role: str  # "learner" or "generator"
    ranks: Ranks
    learners: int
    generators: int
    nodes: list[launch.Node]
    node: int  # index of this process's node
    store: dist.Store  # shared by all ranks of the job
    bridge: Bridge | None  # None on learners that send no weights
    senders: tuple[int, ...] = (0,)  # learners that send weights

    @property
    def name(self) -> str:
        return f"{self.role} {self.ranks.rank}"

    @property
    def here(self) -> launch.Node:
        return self.nodes[self.node]

    @property
    def is_first_here(self) -> bool:
        """True on the first rank of its role on this node."""
        return self.ranks.local_rank == (0 if self.role == "learner" else self.here.learners)


def init_split(generators: int, hang_timeout: float = 0) -> Split:
    """Join this rank's role: the last `generators` ranks of this node generate, the others learn; nodes may differ. Raise
    UserError if the job has no generator or no learner. hang_timeout: seconds, of the watchdog; 0 turns it off.
    Collective."""
    store, own_device, timeout = meet(generators, hang_timeout)
    here = launch.here()
    nodes = launch.nodes()
    _check_split(nodes)
    number = next(i for i, node in enumerate(nodes) if here.rank in node.ranks)
    role, rank, alike = _role(nodes, number, here.local_rank)
    size = _count(nodes, f"{role}s")
    check_own(store, alike, here.rank, own_device, role)
    own_store = dist.PrefixStore(role, store)
    dist.init_process_group(device.BACKENDS[own_device.type], store=own_store, rank=rank, world_size=size, timeout=timeout)
    sender_of = senders(nodes)
    bridge = Bridge.of(sender_of, nodes, number, here.local_rank, store, own_device, timeout)
    return Split(
        role=role,
        ranks=Ranks(rank, size, here.local_rank, own_device),
        learners=_count(nodes, "learners"),
        generators=_count(nodes, "generators"),
        nodes=nodes,
        node=number,
        store=store,
        bridge=bridge,
        senders=tuple(_count(nodes[:sender], "learners") for sender in sorted(set(sender_of.values()))),
    )


def _role(nodes: list[launch.Node], number: int, local_rank: int) -> tuple[str, int, range]:
    """Return a rank's role, its number within that role, and the ranks of its node with the same role. number: the node's."""
    node, before = nodes[number], nodes[:number]
    if local_rank < node.learners:
        return "learner", _count(before, "learners") + local_rank, node.ranks[: node.learners]
    return "generator", _count(before, "generators") + local_rank - node.learners, node.ranks[node.learners :]


def _count(nodes: list[launch.Node], role: Literal["learners", "generators"]) -> int:
    return sum(getattr(node, role) for node in nodes)


def join(args) -> Split:
    """Call `init_split` with a script's flags. Raise UserError if its schedule splits no ranks."""
    if not args.schedule.split:
        raise UserError(
            f"the script splits the ranks, and its Args have {type(args.schedule).__name__}, which does not: write the "
            "schedule of the script that it was copied from into them."
        )
    return init_split(args.schedule.generators, args.hang_timeout)


def _check_split(nodes: list[launch.Node]) -> None:
    """Raise UserError, the same on all ranks, if a node has fewer ranks than generators, or the job lacks a role."""
    for node in nodes:
        if node.generators > node.size:
            raise UserError(f"--generators {node.generators}: {node.host} has {node.size} ranks. Lower it there.")
    for role in ("learners", "generators"):
        if not _count(nodes, role):
            start_two = "start at least two ranks with `torchrun --standalone --nproc-per-node 2 ...`"
            remedy = start_two if len(nodes) == 1 else "change it on some of the nodes"
            found = f"--generators leaves no {role[:-1]}: {'; '.join(map(str, nodes))}"
            raise UserError(f"{found}. It is the number of each node's ranks that generate: {remedy}.")


def engines_first(role: str) -> None:
    """If generators and learners share this node's devices, report that a generator's engine has started, and let a learner
    wait for all engines of the node: a starting engine counts memory that others allocate meanwhile as its own."""
    here = launch.here()
    node = next((node for node in launch.nodes() if node.first == here.first), None)
    shares = node and node.generators and node.learners
    if not shares or not device.devices_are_shared():
        return
    store = launch.open_store(timedelta(days=7))
    if role == "generator":
        store.set(f"engine/{here.first}/{here.local_rank}", "started")
    else:
        store.wait([f"engine/{here.first}/{rank}" for rank in range(node.learners, node.size)])

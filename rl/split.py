"""The split of the ranks into generators and learners, and the ways between the two sides."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.distributed as dist

from rl.errors import UserError
from rl.ranges import Range
from rl.ranks import device, heartbeat, launch, watchdog
from rl.ranks.dist import Ranks, show_group, take_name, time_limit, watch
from rl.transport import elastic
from rl.transport.bridge import Bridge, senders
from rl.transport.relay import read_key


@dataclass
class SplitArgs:
    """The split of the ranks into generators and learners."""

    generators: Annotated[int, Range(at_least=0)] = 1
    """Ranks of this node that generate; the others learn. Nodes may differ: 0 for one that only learns, all of its ranks for
    one that only generates."""
    ring_mb: Annotated[int, Range(at_least=1)] = 256
    """Shared memory for the samples on their way to the learners, in MiB on each node."""
    publish: Literal["full", "delta"] = "full"
    """What a publish of the weights sends. delta: the elements that have changed since the one before, in the generators'
    precision, where that takes less; worth it for --rollout-dtype bfloat16. The first of a run is always whole."""
    publish_over: Literal["auto", "host"] = "auto"
    """The way of the weights. auto: from device to device (NCCL, HCCL) where each rank has a device of its own. host: through
    host memory, and between nodes over gloo."""
    cluster_key_file: str | None = None
    """File with a secret that all nodes hold, by which those that only generate send samples to those that learn. Without it
    torchrun's store holds one, open to the network that the job trusts."""

    @property
    def engine_sleeps(self) -> bool:
        """Never: generators do not wait for a learner on their device."""
        return False

    def check(self) -> None:
        """Raises UserError for settings that cannot work."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        if self.ring_mb > memory:
            raise UserError(f"--ring-mb {self.ring_mb} is more than the {memory} MiB of this machine's memory.")
        if self.cluster_key_file is not None:
            read_key(self.cluster_key_file)


@dataclass(frozen=True)
class Split:
    """This process's place in a job whose ranks are split: `ranks` counts within its role, and the default process group holds
    that role alone (vLLM makes groups out of the default group, by calls that learners would never join)."""

    role: str  # "learner" or "generator"
    ranks: Ranks
    learners: int
    generators: int
    nodes: list[launch.Node]
    node: int  # which of them this is
    store: dist.Store  # shared by all ranks of the job
    bridge: "Bridge | elastic.Links | elastic.JoiningBridge | None"  # None on learners that send no weights
    senders: tuple[int, ...] = (0,)  # learners that send weights
    elastic: "elastic.Crew | elastic.Seat | None" = None  # where generators come and go: a learner's part in it, a generator's

    @property
    def name(self) -> str:
        return f"{self.role} {self.ranks.rank}"

    @property
    def number(self) -> int | str:
        """A generator's name among all that there are."""
        return elastic.names(self.elastic.member, self.generators)[self.ranks.rank] if self.is_member else self.ranks.rank

    def share_of(self, engines: list[int | str] | None, tensor_parallel: int) -> tuple[int, int] | None:
        """Where generators come and go: which of these engines is this rank's, and how many they are; 0 if it is not among
        them. None elsewhere."""
        if engines is None:
            return None
        first = self.ranks.rank - self.ranks.rank % tensor_parallel
        number = elastic.names(self.elastic.member, self.generators)[first] if self.is_member else first
        return (engines.index(number), len(engines)) if number in engines else (0, 0)

    @property
    def is_member(self) -> bool:
        """Whether this is a job that has joined the learners'."""
        return not self.learners

    @property
    def place(self) -> str:
        """Names this node in the store."""
        return f"member/{self.elastic.member}/{self.node}" if self.is_member else str(self.node)

    @property
    def here(self) -> launch.Node:
        return self.nodes[self.node]

    @property
    def is_first_here(self) -> bool:
        """True on the first rank of its role on this node."""
        return self.ranks.local_rank == (0 if self.role == "learner" else self.here.learners)


def init_split(
    generators: int, hang_timeout: float = 0, node_timeout: float = 0, elastic_at: str | None = None, over: str = "auto"
) -> Split:
    """Joins this rank's role: the last `generators` ranks of this node generate, the others learn; nodes may differ. Raises
    UserError where the job has no generator or no learner. hang_timeout, node_timeout: of the watchdog and the heartbeat, in
    seconds; 0 for none. elastic_at: the address at which generators may join. over: --publish-over."""
    here, timeout = launch.here(), time_limit(hang_timeout)
    own_device = device.claim(here.local_rank)
    store = launch.join(timeout)
    watch(f"rank {here.rank}", hang_timeout)
    with watchdog.doing("all nodes to come"):
        launch.meet(store, generators)
        take_name(f"rank {here.rank}")
    heartbeat.start(node_timeout)
    _check_split(launch.nodes(), elastic_at)
    number = [node.first for node in launch.nodes()].index(here.first)
    node, before = launch.nodes()[number], launch.nodes()[:number]
    learners, all_generators = sum(n.learners for n in launch.nodes()), sum(n.generators for n in launch.nodes())
    if here.local_rank < node.learners:
        role, rank, size = "learner", sum(n.learners for n in before) + here.local_rank, learners
        members = node.ranks[: node.learners]
    else:
        role, size = "generator", all_generators
        members = node.ranks[node.learners :]
        rank = sum(n.generators for n in before) + here.local_rank - node.learners
    ranks = Ranks(rank, size, here.local_rank, own_device)
    take_name(f"{role} {rank}")
    with watchdog.doing(f"all {role}s of this node to name their devices"):
        device.check_own(store, members, here.rank, own_device, role)
    with watchdog.doing(f"all {role}s to join"):
        own_store = dist.PrefixStore(role, store)
        dist.init_process_group(device.backend(own_device), store=own_store, rank=rank, world_size=size, timeout=timeout)
    show_group(f"the {role}s", dist.group.WORLD)
    sender_of = senders(launch.nodes(), one=bool(elastic_at))
    sent_from = own_device if over == "auto" else torch.device(device.HOST)
    with watchdog.doing("the bridge's ranks to join"):
        bridge = Bridge.of(sender_of, launch.nodes(), number, here.local_rank, store, sent_from, timeout)
    if bridge and bridge.group:
        show_group("the bridge", bridge.group)
    launch.heed_sigterm(store, learns=role == "learner")
    sending = tuple(sum(n.learners for n in launch.nodes()[:sender]) for sender in sorted(set(sender_of.values())))
    split = Split(role, ranks, learners, all_generators, launch.nodes(), number, store, bridge, sending or (0,))
    return elastic.enter(split, elastic_at, node_timeout) if elastic_at else split


def _check_split(nodes: list[launch.Node], elastic_at: str | None) -> None:
    """Raises UserError, the same on all ranks, where a node has fewer ranks than generators, or the job lacks a role."""
    for node in nodes:
        if node.generators > node.size:
            raise UserError(f"--generators {node.generators}: {node.host} has {node.size} ranks. Lower it there.")
    for role in () if elastic_at else ("learners", "generators"):
        if not sum(getattr(node, role) for node in nodes):
            remedy = (
                "start at least two with `torchrun --standalone --nproc-per-node 2 ...`" if len(nodes) == 1 else "change that"
            )
            found = f"--generators leaves no {role[:-1]}: {'; '.join(map(str, nodes))}"
            raise UserError(f"{found}. Of each node's ranks that many generate: {remedy}.")

"""Generators that come and go while the learners continue (--elastic-generators): torchrun jobs of their own, the members,
which join the learners' job through a store at a port of the first learner.

    first learner                                             each rank of a member
    Lobby, a thread: who is there, who has joined or gone     Heartbeat towards that store
    Links: a process group for each member         weights -> JoiningBridge
    Crew, on every learner: who is at work         <- samples over ZeroMQ, each record with its member's number

A process group does not outlive its ranks, so each member has a group of its own with the first learner, over host memory.
One that is lost is dropped: nothing waits for it any more. What every learner must take alike - who is at work, and whose
samples count - changes through records in the inbox alone. rl/samples/claims.py has what becomes of a lost member's tickets.

Left out: NCCL on these groups (a lost rank there takes its peers along), and learners that come and go.
"""

import json
import platform
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from rl.errors import UserError
from rl.ranks import device, heartbeat, launch, watchdog
from rl.transport.bridge import WINDOW, Bridge, broadcast_from_first

FOREVER = timedelta(days=7)
SLICE = timedelta(seconds=0.5)  # after which a wait for a member looks whether that has been given up
LEARNERS_GONE = "the learners are lost. With torchrun's --max-restarts this job starts again, and waits for them."
GIVEN_UP = "the learners took this job for lost. With torchrun's --max-restarts it starts and joins them again."
LOOK_SECONDS = 10.0
OPEN_SECONDS = 60.0  # for a member that is let in to answer


def enter(split, address: str, node_timeout: float):
    """The split of this rank with its part in all this. Collective in its job. Raises UserError for an address that does not
    work."""
    if split.learners:
        return _found(split, address, node_timeout)
    with watchdog.doing(f"the learners at {address} to take generators in"):
        store = dist.PrefixStore("run", _connect(address, is_host=False))
        host, learning_nodes = json.loads(store.get("open"))
    own = launch.open_store(FOREVER)
    if split.ranks.is_main:
        own.set("member", str(store.add("members", 1)))
    seat = Seat(int(own.get("member")), host, learning_nodes)
    if split.ranks.is_main and node_timeout:
        seat.show_life(store.clone(), node_timeout)
    return replace(split, store=store, bridge=JoiningBridge(store, seat.member, split), elastic=seat)


def _found(split, address: str, node_timeout: float):
    """The learners' own job."""
    is_main = split.role == "learner" and split.ranks.is_main
    if is_main:
        store = dist.PrefixStore("run", _connect(address, is_host=True))
        store.set("open", json.dumps([platform.node(), sum(node.learners > 0 for node in split.nodes)]))
    else:
        store = dist.PrefixStore("run", _connect(address, is_host=False))
    if split.role == "generator":
        return replace(split, store=store, elastic=Seat(0, split.nodes[0].host, 1))
    crew = Crew(split, address, Lobby(store.clone(), split.bridge, node_timeout) if is_main else None)
    return replace(split, store=store, elastic=crew, bridge=crew.lobby.links if is_main else None)


def _connect(address: str, is_host: bool) -> dist.Store:
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), None, is_host, FOREVER if not is_host else timedelta(seconds=30), False)
    except (dist.DistError, RuntimeError) as error:
        raise UserError(
            f"--elastic-generators {address}: {str(error).splitlines()[0]}. Give the first learner's host and a port that is "
            "free there, the same to all."
        ) from None


class Seat:
    """A generator's place: the number of its member; 0 for the learners' own job."""

    def __init__(self, member: int, host: str, learning_nodes: int):
        self.member, self.host, self.learning_nodes = member, host, learning_nodes

    def why_it_fails(self, store: dist.Store, lost_connection: bool) -> str:
        """What is behind an error of a member: empty if it is its own."""
        try:
            return GIVEN_UP if store.check([f"life/gone/{self.member}"]) else LEARNERS_GONE * lost_connection
        except dist.DistError:
            return LEARNERS_GONE

    def show_life(self, store: dist.Store, timeout: float) -> None:
        """Gives the learners signs of life, and ends this job if they have fallen silent or taken it for lost."""
        nodes = [launch.Node(self.host, 0, 1, 0)]
        heartbeat.add(MemberHeartbeat(f"member {self.member}", self.member, nodes, timeout, dist.PrefixStore("life", store)))


class MemberHeartbeat(heartbeat.Heartbeat):
    def _round(self) -> tuple[str, list[int]]:
        found = super()._round()
        if self.store.check([f"gone/{self.rank}"]):
            return GIVEN_UP, [self.rank]
        return found


class Crew:
    """Who generates, the same on every learner: changed by records that come through the inbox, and by nothing else."""

    def __init__(self, split, address: str, lobby: "Lobby | None"):
        self.lobby, self.host = lobby, address.rpartition(":")[0]
        self.own = list(range(split.generators))  # the generators of the learners' job
        self.members: dict[int, list[str]] = {}  # at work: the names of their generators
        self.gone: dict[int, int] = {}  # members, and how many groups had come from each
        self.came: Counter[int] = Counter()  # groups, by member
        self._reissued, self._reissued_at = 0, 0.0  # members that had gone at the last look for their tickets, and when it was

    def unsettled(self) -> bool | str:
        """Whether tickets of members that are gone are to be looked for: "new" after a loss. Later again and again, since one
        that was stopped for a while may take a ticket before it learns that it was given up."""
        new, now = len(self.gone) > self._reissued, time.monotonic()
        if not new and (not self.gone or now < self._reissued_at + LOOK_SECONDS):
            return False
        self._reissued, self._reissued_at = len(self.gone), now
        return "new" if new else True

    @property
    def names(self) -> set:
        """Of all generators at work."""
        return {*self.own, *(name for names in self.members.values() for name in names)}

    def engines(self, tensor_parallel: int) -> list:
        """The first generator of each engine at work."""
        return [name for names in (self.own, *self.members.values()) for name in names[::tensor_parallel]]

    def news(self) -> list[bytes]:
        """Records for the inbox: who has come or gone. On the first learner."""
        news = []
        while self.lobby and self.lobby.news:
            news.append(json.dumps(self.lobby.news.popleft()).encode())
        return news

    def change(self, record: bytes) -> None:
        """Takes a record of `news`."""
        news = json.loads(record)
        member, told = news["member"], f"the generators of {news['host']} (member {news['member']})"
        if "joined" in news:
            self.members[member] = news["joined"]
        elif member in self.members:
            del self.members[member]
            self.gone[member] = self.came[member]
            told += f" are gone: {news['gone']}. What they had begun starts again elsewhere"
        if self.lobby:
            print(told + (" have joined" if "joined" in news else ""), file=sys.stderr, flush=True)

    def knows(self, record: bytes) -> bool:
        """Whether the member that sent this record (`sealed`) has joined, or is gone again. A member samples as soon as it has
        weights, so its first records may arrive before the news that it has joined."""
        member = int.from_bytes(record[:8], "little")
        return member in self.members or member in self.gone

    def open(self, record: bytes, group: bytes) -> bytes | None:
        """The record of a member that came with its number (`sealed`); None if the member is gone. group: what a record that
        is a group begins with."""
        member = int.from_bytes(record[:8], "little")
        if member not in self.members:
            return None
        self.came[member] += record[8:].startswith(group)
        return record[8:]


def sealed(record: bytes, member: int) -> bytes:
    return member.to_bytes(8, "little") + record


class Lobby:
    """The first learner's end, a thread: lets members in and finds out which are gone. store: over a connection of its own.
    bridge: to the generators of the learners' own job."""

    def __init__(self, store: dist.Store, bridge, node_timeout: float):
        self.store, self.timeout = store, node_timeout
        self.links, self.news = Links(bridge), deque()
        self.closes = False  # the run is at its end: whoever leaves has done its work
        self._publisher, self._has_publisher = None, threading.Event()
        self._there: dict[int, Link] = {}  # members that were let in
        self._knocked: set[int] = set()
        self._signs = heartbeat.Signs([])
        threading.Thread(target=self._watch, name="lobby", daemon=True).start()

    def serve(self, publisher) -> None:
        """The publisher whose weights members get."""
        self._publisher = publisher
        self._has_publisher.set()

    def drop(self, member: int, why: str) -> None:
        """Gives a member up: nothing waits for it from here on."""
        if link := self._there.pop(member, None):
            link.lost = True
            self.links.drop(link)
            self.store.set(f"life/gone/{member}", "")
            sign = f"life/pulse/{member}"  # their last word, where a publish was on its way to them
            has_left = self.store.check([sign]) and json.loads(self.store.get(sign))[0] == heartbeat.ENDED
            self.news.append({"member": member, "host": link.host, "gone": "they have left" if has_left else why})

    def _watch(self) -> None:
        rounds, life = 0, dist.PrefixStore("life", self.store)
        try:
            while True:
                life.set("pulse/0", json.dumps([rounds, "learner 0", watchdog.place(), "", []]))
                self._open_to_those_who_knock()
                self._drop_those_who_have_gone(life)
                rounds += 1
                time.sleep(self.timeout / heartbeat.ROUNDS if self.timeout else 1.0)
        except dist.DistError:  # this process is about to end
            pass

    def _open_to_those_who_knock(self) -> None:
        for member in range(1, self.store.add("members", 0) + 1):
            if member not in self._knocked and self.store.check([f"ready/{member}"]):
                self._knocked.add(member)
                threading.Thread(target=self._let_in, args=(member,), name=f"member {member}", daemon=True).start()

    def _drop_those_who_have_gone(self, life: dist.Store) -> None:
        self._signs.ranks = list(self._there)
        for member in self._signs.look(life):
            self.drop(member, f"no sign of life for {self.timeout:g} s{self._signs.last_seen(member)}")
        ended = [m for m in self._there if self._signs.last.get(m, [0])[0] == heartbeat.ENDED]
        for member in [] if self.closes else ended:
            self.drop(member, "they have left")

    def _let_in(self, member: int) -> None:
        """Makes the group with a member, says that it has joined, and gives it the newest weights."""
        host, size, nodes = json.loads(self.store.get(f"ready/{member}"))
        own = self.store.clone()
        try:
            link, limit = dist.PrefixStore(f"link/{member}", own), timedelta(seconds=OPEN_SECONDS)
            group = device.host_group(link, 0, 1 + nodes, limit, WINDOW)
        except (dist.DistError, RuntimeError) as error:
            print(f"the generators of {host} (member {member}) have not joined: {str(error).splitlines()[0]}", file=sys.stderr)
            own.set(f"life/gone/{member}", "")  # or it would wait to be let in
            return
        link = Link(group, host, lambda why: self.drop(member, why))
        self.news.append({"member": member, "host": host, "joined": names(member, size)})
        self._there[member] = link  # from here on it may be dropped, which is news, too
        self._has_publisher.wait()
        try:
            self._publisher.greet(link, lambda version: own.set(f"first/{member}", str(version)))
        except Exception as error:
            self.drop(member, f"{type(error).__name__}: {error}")
            raise


def names(member: int, size: int) -> list[str]:
    return [f"{member}.{rank}" for rank in range(size)]


class Link:
    """The first learner's end of a member's group."""

    device, window = torch.device("cpu"), WINDOW

    def __init__(self, group, host: str, drop: Callable[[str], None]):
        self.group, self.host, self._drop = group, host, drop
        self.version = -1  # of the newest weights that were sent
        self.lost = False

    def broadcast(self, tensor: torch.Tensor) -> "Sending":
        return Sending([(self, self.send(tensor))])

    def send(self, tensor: torch.Tensor):
        return None if self.lost else broadcast_from_first(self.group, tensor, FOREVER)

    def wait(self, work) -> None:
        """Returns when the work is done, or the member given up."""
        while work and not self.lost:
            try:
                return work.wait(SLICE)
            except RuntimeError:
                if work.is_completed():  # and has failed
                    self._drop("the connection has broken")


class Sending:
    """What is under way to several links, and to the bridge of the learners' own job."""

    def __init__(self, works: list[tuple[Link, object]], own=None):
        self.works, self.own = works, own

    def wait(self) -> None:
        if self.own:
            self.own.wait()
        for link, work in self.works:
            link.wait(work)


class Links:
    """A Bridge to all generators, wherever they are."""

    window = WINDOW

    def __init__(self, bridge):
        self.bridge, self.device = bridge, bridge.device if bridge else torch.device("cpu")
        self.all: list[Link] = []  # those that have the newest weights, or are about to get them
        self._now: list[Link] = []
        self._given_up: list[Link] = []  # kept: a group's destructor would wait for what is under way to nobody

    def add(self, link: Link, version: int) -> None:
        """One that has this version now."""
        link.version = version
        if not link.lost:
            self.all.append(link)

    def begin(self, version: int) -> None:
        """From here on this version is sent, to those that have the one before."""
        self._now = [link for link in list(self.all) if link.version < version]
        for link in self._now:
            link.version = version

    def broadcast(self, tensor: torch.Tensor) -> Sending:
        host = tensor.to("cpu") if self._now else None
        return Sending([(link, link.send(host)) for link in self._now], self.bridge and self.bridge.broadcast(tensor))

    def drop(self, link: Link) -> None:
        self._given_up.append(link)
        if link in self.all:
            self.all.remove(link)


class JoiningBridge:
    """A member's end. The group is made when its engine is ready, so that nobody waits for that."""

    device, is_far = torch.device("cpu"), True

    def __init__(self, store: dist.Store, member: int, split):
        self.store, self.member, self.split = store, member, split
        self.first: int | None = None  # the version with which it begins
        self._bridge: Bridge | None = None

    def open(self) -> None:
        """Joins. Waits until the learners have weights to give."""
        ranks, nodes = self.split.ranks, self.split.nodes
        if ranks.is_main:
            self.store.set(f"ready/{self.member}", json.dumps([platform.node(), ranks.world_size, len(nodes)]))
        with watchdog.doing("the learners to let this node in"):
            own = dist.PrefixStore(f"link/{self.member}", self.store.clone())
            node_of = [-1, *(number for number, node in enumerate(nodes) for _ in range(node.size))]
            self._bridge = Bridge.over_host(own, 1 + ranks.rank, node_of, FOREVER)
            self.first = int(self.store.get(f"first/{self.member}"))

    @property
    def window(self) -> int:
        return self._bridge.window

    def broadcast(self, tensor: torch.Tensor):
        return self._bridge.broadcast(tensor)

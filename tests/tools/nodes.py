"""Machines for tests and benchmarks: namespaces joined by a bridge. Each has its own network, hostname, processes and
/dev/shm. They share all files except, on request, one directory.

    with Network(3) as network:                             node1, node2, node3: 10.77.0.1, ...
        job = network.start([(2, ["train_async.py", "--generators", 0]), (1, [...]), (1, [...])])
        consoles = job.wait(60)                             [(exit code, console), ...]

As root, or as anybody where unprivileged user namespaces are allowed. All of it ends with this process, however that ends.
"""

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from helpers import ROOT, command, environment

SPACES = {"user": 0x10000000, "mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "net": 0x40000000, "pid": 0x20000000}
MTU = 9000  # on all links, so that those through a process carry few frames


class Unavailable(Exception):
    """This machine cannot make namespaces. The message says why."""


def enter(pid: int, kinds: Sequence[str] = tuple(SPACES)) -> None:
    """Moves this process, which must have one thread, into the namespaces of another; the pid namespace holds for its children.
    Stays in those in which both are."""
    libc = ctypes.CDLL(None, use_errno=True)
    theirs = [(kind, f"/proc/{pid}/ns/{kind}") for kind in kinds]
    files = [(kind, os.open(path, os.O_RDONLY)) for kind, path in theirs if not os.path.samefile(path, f"/proc/self/ns/{kind}")]
    for kind, file in files:
        if libc.setns(file, SPACES[kind]):
            raise OSError(ctypes.get_errno(), f"setns {kind} of process {pid}")
        os.close(file)
    platform._uname_cache = None  # the hostname


class Space:
    """A process that keeps namespaces alive."""

    def __init__(self, kinds: str, setup: str, inside: "Space | None" = None):
        """kinds: options of `unshare`; setup: shell commands; inside: whose user namespace it shares, as it must where links
        are to be laid from one into the other."""
        user = ["--user", "--map-root-user"] if os.geteuid() and not inside else []
        started = [
            "unshare",
            *user,
            *kinds.split(),
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            f"set -e; {setup}; echo ready; exec cat",
        ]
        if inside and os.geteuid():
            started = ["nsenter", "--target", str(inside.pid), "--user", "--preserve-credentials", *started]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        try:
            self._holder = subprocess.Popen(started, start_new_session=True, **pipes)
        except OSError as error:
            raise Unavailable(f"no namespaces here: {error}") from None
        said = self._holder.stdout.readline()
        if said != "ready\n":
            said += self._holder.communicate(timeout=10)[0]
            raise Unavailable(f"no namespaces here: {said.strip()}")
        (self.pid,) = map(int, Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split())

    def run(self, line: str) -> str:
        """Runs a command in its network."""
        user = ["--user", "--preserve-credentials"] if os.geteuid() else []
        inside = ["nsenter", "--target", str(self.pid), *user, "--net", *line.split()]
        done = subprocess.run(inside, text=True, capture_output=True, timeout=30)
        if done.returncode:
            raise Unavailable(f"{line}: {done.stderr.strip()}")
        return done.stdout

    def end(self) -> None:
        self._holder.kill()
        self._holder.communicate()


class Node(Space):
    """A machine. Its link is called e0."""

    def __init__(self, number: int, switch: Space, hosts: Path, own: Path | None):
        self.name, self.address, self.switch = f"node{number}", f"10.77.0.{number}", switch
        self.port = f"port{number}"  # the link's other end, at the switch
        setup = f"mount -t tmpfs tmpfs /dev/shm; mount --bind {hosts} /etc/hosts; hostname {self.name}"
        if own:
            (own / self.name).mkdir(parents=True, exist_ok=True)
            setup += f"; mount --bind {own / self.name} {own}"
        super().__init__("--net --uts --ipc --pid --mount --mount-proc", setup, inside=switch)
        switch.run(f"ip link add {self.port} type veth peer name e0 netns {self.pid}")
        self.run("ip link set lo up")
        self.join()

    def join(self) -> None:
        """Join the others by the link, whose ends are there."""
        self.switch.run(f"ip link set {self.port} mtu {MTU} master bridge up")
        self.run(f"ip link set e0 mtu {MTU} up")
        self.run(f"ip address add {self.address}/24 dev e0")

    def start(
        self, *arguments, console: IO[str], ranks: int | None = None, env: dict[str, str] | None = None, **how
    ) -> subprocess.Popen:
        """Starts a script here as helpers.command says; console: takes stdout and stderr."""
        if how.get("fresh"):
            started = [
                sys.executable,
                ROOT / "tests" / "tools" / "nodes.py",
                str(self.pid),
                *command(*arguments, ranks=ranks, **how),
            ]
        else:
            started = command(*arguments, ranks=ranks, **how)
        where = environment(PYTHONUNBUFFERED="1", NODE=str(self.pid), MARK=self.name, **(env or {}))
        pipes = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": subprocess.STDOUT}
        return subprocess.Popen(started, cwd=ROOT, env=where, start_new_session=True, **pipes)

    def processes(self) -> dict[int, str]:
        """Living processes here and their names; rank 1 of this node is called node2-1 once it has begun, if it is a fork."""
        own, found = os.stat(f"/proc/{self.pid}/ns/pid"), {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(process.name) != self.pid and os.path.samestat(os.stat(process / "ns/pid"), own):
                    name, _, state = (process / "stat").read_text().partition("(")[2].rpartition(")")
                    found |= {int(process.name): name} if state.split()[0] not in "ZX" else {}
        return found

    def left_over(self) -> list[str]:
        """Living processes, and what lies in /dev/shm. To be asked when all has ended."""
        files = os.listdir(f"/proc/{self.pid}/root/dev/shm")
        return [f"{self.name}: {what}" for what in [*self.processes().values(), *files]]


class Job:
    """A torchrun on each of several nodes."""

    def __init__(self, processes: list[subprocess.Popen], consoles: list[IO[str]]):
        self.processes, self._consoles = processes, consoles

    def console(self, number: int) -> str:
        """Return the output so far of this node (number from 0), stdout and stderr."""
        self._consoles[number].seek(0)
        return self._consoles[number].read()

    def wait(self, timeout: float) -> list[tuple[int, str]]:
        """Exit code and console of each node; raises TimeoutError, with the consoles, after this many seconds."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, deadline - time.monotonic()))
        found = [(process.returncode, self.console(number)) for number, process in enumerate(self.processes)]
        if any(code is None for code, _ in found):
            raise TimeoutError(
                "\n----\n".join(f"node {number}: {code}\n{text}" for number, (code, text) in enumerate(found, 1))
            )
        return found

    def end(self) -> None:
        for process, console in zip(self.processes, self._consoles, strict=True):
            process.kill()
            process.wait()
            console.close()


class Network:
    """Nodes on one bridge, which is alone in a network namespace of its own."""

    def __init__(self, nodes: int, own: Path | None = None):
        """own: a directory that each node sees as its own; from here its files are in own/node1, own/node2, ... Raises
        Unavailable."""
        self.nodes: list[Node] = []
        self._jobs: list[Job] = []
        self._directory = Path(tempfile.mkdtemp(prefix="rl-nodes-"))
        try:
            if lacking := [tool for tool in ("unshare", "nsenter", "ip", "tc") if not shutil.which(tool)]:
                raise Unavailable(f"no namespaces here: {', '.join(lacking)} not found")
            hosts = "".join(f"10.77.0.{number} node{number}\n" for number in range(1, nodes + 1))
            (self._directory / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            self._switch = Space("--net", "true")
            self._switch.run("ip link add bridge type bridge")
            self._switch.run("ip link set bridge up")
            for number in range(1, nodes + 1):
                self.nodes.append(Node(number, self._switch, self._directory / "hosts", own))
        except BaseException:
            self.close()
            raise

    def start(
        self, of_nodes: list[tuple[int, list]], rendezvous: str = "c10d", restarts: int = 0, env: dict | None = None, **how
    ) -> Job:
        """Starts a job: of each node its ranks, and a script with its flags. rendezvous: c10d or static."""
        meet = ["--nnodes", len(of_nodes), "--max-restarts", restarts, "--monitor-interval", 0.1]
        processes, consoles = [], []
        for number, (ranks, (script, *flags)) in enumerate(of_nodes):
            if rendezvous == "c10d":
                where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29500", "--rdzv-id", "test"]
            else:
                where = ["--node-rank", number, "--master-addr", "node1", "--master-port", 29500]
            consoles.append(open(self._directory / f"{uuid.uuid4()}", "w+", errors="replace"))  # noqa: SIM115
            spare = {"SPARE_RANKS": str(ranks * restarts)}
            with_ = {"ranks": ranks, "env": {**(env or {}), **spare}, "console": consoles[-1], **how}
            processes.append(self.nodes[number].start(*meet, *where, ROOT / script, *flags, **with_))
        self._jobs.append(Job(processes, consoles))
        return self._jobs[-1]

    def left_over(self) -> list[str]:
        """What a job has left on its nodes."""
        return [line for node in self.nodes for line in node.left_over()]

    def close(self) -> None:
        for node in self.nodes:
            node.end()
        for job in self._jobs:
            job.end()
        if hasattr(self, "_switch"):
            self._switch.end()
        shutil.rmtree(self._directory)

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def main(pid: str, *line: str) -> None:
    """Runs a command in the namespaces of a process; it gets this process's signals, and ends with it."""
    enter(int(pid))
    os.chdir(ROOT)
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        os.execvp(line[0], line)
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])

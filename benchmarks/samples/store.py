"""The load of a job's store, the one server that all ranks share, by the number of generators.

    python benchmarks/samples/store.py        # writes benchmarks/results/store.{json,md}

The server is alone in a process, whose CPU time is measured. The generators are simulated, but what they ask of it is not: each
has the connections and threads of a rank of train_async.py (control block, tickets), in a few processes. A
step publishes once and trains one ticket a generator.
"""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import ROOT, setting, table, words, write
from torch.distributed import PrefixStore, TCPStore

from rl.samples.channel import ControlBlock
from rl.samples.split_schedule import AsyncSchedule
from rl.samples.tickets import Tickets, open_tickets
from user_processes.server import python_path

PROCESSES = 4  # of the simulated generators
LIMIT = timedelta(minutes=10)


@dataclass
class Args:
    generators: tuple[int, ...] = (8, 64, 512)
    """Their number."""
    step_seconds: tuple[float, ...] = (10.0, 1.0)
    """How long a step takes."""
    seconds: float = 30.0
    """How long each case is measured."""
    serve: bool = False
    """To be the server (the benchmark starts it)."""
    simulate: str = ""
    """To be some of the generators (the benchmark starts them): port, number, all, seconds of a step; as JSON."""


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def serve() -> None:
    raise_limit()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    print(store.port, flush=True)
    sys.stdin.read()


def raise_limit() -> None:
    """Of open files."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connect(port: int) -> PrefixStore:
    return PrefixStore("start/0", TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT))


def schedule(generators: int) -> AsyncSchedule:
    return AsyncSchedule(ppo_mini_batch_size=generators)


def simulate(port: int, number: int, generators: int, step_seconds: float) -> None:
    """Some of the generators, until the server goes."""
    raise_limit()
    ranks = []
    for _ in range(number):
        store = connect(port)
        split = SimpleNamespace(store=store, role="generator", ranks=SimpleNamespace(is_main=False))
        tickets = Tickets(connect(port), schedule(generators), 10**9, generators)
        ranks.append((ControlBlock(split), tickets, []))
    connect(port).add("ready", number)
    while True:
        now = time.monotonic()
        for control, tickets, ends in ranks:
            while ends and ends[0] <= now:
                ends.pop(0)
            state = control.read()
            ends += [now + step_seconds] * len(tickets.take(2 - len(ends), len(ends), state.version, state))
        time.sleep(0.1)


def measure(generators: int, step_seconds: float, seconds: float) -> dict:
    line = [sys.executable, __file__]
    env = os.environ | {"PYTHONPATH": python_path(str(ROOT)), "OMP_NUM_THREADS": "1"}
    env["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch's store looks up the name of whoever connects, and waits for it
    pipes = {"env": env, "stdin": subprocess.PIPE}
    server = subprocess.Popen([*line, "--serve"], stdout=subprocess.PIPE, text=True, **pipes)
    started = [server]
    try:
        port = int(server.stdout.readline())
        store = connect(port)
        learner = SimpleNamespace(store=store, role="learner", ranks=SimpleNamespace(is_main=True))
        open_tickets(store)
        control = ControlBlock(learner)
        control.update(version=0)
        each = -(-generators // PROCESSES)
        for first in range(0, generators, each):
            what = json.dumps([port, min(each, generators - first), generators, step_seconds])
            started.append(subprocess.Popen([*line, "--simulate", what], stderr=subprocess.DEVNULL, **pipes))
        while store.add("ready", 0) < generators:
            assert all(process.poll() is None for process in started), "a simulated generator ended"
            time.sleep(0.1)
        version, begun, before = 0, time.monotonic(), cpu_seconds(server.pid)
        first = store.add("tickets/started", 0)
        while time.monotonic() < begun + seconds:
            time.sleep(step_seconds)
            control.update(version=(version := version + 1))
        took, used = time.monotonic() - begun, cpu_seconds(server.pid) - before
        tickets = store.add("tickets/started", 0) - first
    finally:
        for process in started:
            process.kill()
            process.wait()
    return {"generators": generators, "step_seconds": step_seconds, "core": used / took, "tickets_a_step": tickets / version}


def main(args: Args) -> None:
    results = []
    for step_seconds in args.step_seconds:
        for generators in args.generators:
            results.append(measure(generators, step_seconds, max(args.seconds, 3 * step_seconds)))
            print(results[-1], flush=True)
    head = ["generators", *(f"a step in {seconds:g} s" for seconds in args.step_seconds)]
    rows = [[str(n), *(f"{100 * r['core']:.1f}%" for r in results if r["generators"] == n)] for n in args.generators]
    under = setting()
    text = f"Share of one core that the store takes:\n\n{table(head, rows)}\n\n{words(under)}."
    write("store", {"setting": under, "args": asdict(args), "cases": results}, text)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.serve:
        serve()
    elif args.simulate:
        simulate(*json.loads(args.simulate))
    else:
        main(args)

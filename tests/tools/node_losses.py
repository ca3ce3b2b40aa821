"""Takes nodes from a run with --elastic-generators at random moments, lets it go on, and audits what it leaves.

    python tests/tools/node_losses.py --losses 20

Three machines (nodes.py): one learns, two generate, each under a torchrun of its own that restarts its ranks. A machine loses
its network for a while or its power for good, a rank is killed, a machine stands still for a while, or torchrun gets SIGTERM.
test_elastic.py runs a few.
"""

import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from kills import audit
from nodes import Network

RESTARTS = 6  # of a torchrun
ENDLESS = 10**6  # steps


@dataclass
class Args:
    losses: int = 10
    """How many times to take a node away."""
    seed: int = 0
    """Of the moments, the nodes and the ways."""
    patience: float = 120
    """Seconds without a new step after which the run counts as stuck."""
    learners: bool = True
    """Take the node that learns away, too."""
    ranks: int = 1
    """Learners on it."""
    publish: Literal["full", "delta"] = "delta"
    """What a publish sends."""


class Cluster:
    """The three machines and what runs on them."""

    def __init__(self, network: Network, out: Path, args: Args, fresh: bool):
        self.network, self.run, self.args, self.fresh = network, out / "run", args, fresh
        self.consoles, self.jobs = [open(out / f"node{i + 1}.txt", "a") for i in range(3)], {}  # noqa: SIM115
        self.flags = ["--elastic-generators", "10.77.0.1:29600", "--node-timeout", "4", "--output-dir", out]
        self.flags += ["--experiment-name", "run", "--save-freq", "3", "--test-freq", "5", "--val-max-samples", "20"]
        self.flags += ["--staleness-threshold", "2", "--max-num-seqs", "64", "--max-staleness", "2", "--max-ckpt-to-keep", "2"]
        self.flags += ["--publish", args.publish]
        self.steps = ENDLESS

    def start(self, number: int) -> None:
        """A torchrun on that machine, number from 0."""
        role = ["--generators", int(number > 0), "--total-training-steps", self.steps]
        ranks = 1 if number else self.args.ranks
        line = ["--max-restarts", RESTARTS, "--monitor-interval", 0.1, "train_async.py", *self.flags, *role]
        how = {"ranks": ranks, "fresh": self.fresh, "console": self.consoles[number]}
        how["env"] = {"SPARE_RANKS": str(ranks * RESTARTS)}
        self.jobs[number] = self.network.nodes[number].start(*line, **how)

    def revive(self) -> None:
        """Starts what has ended, as a cluster's scheduler would."""
        for number, job in self.jobs.items():
            if job.poll() is not None:
                self.start(number)

    def step(self) -> int:
        """The last that was logged."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        return -1

    def wait_for_steps(self, count: int, patience: float) -> None:
        before, deadline = self.step(), time.monotonic() + patience
        while self.step() < before + count:
            self.revive()
            if time.monotonic() > deadline:
                raise SystemExit(f"no new step for {patience} s after step {before}: see {self.run.parent}")
            time.sleep(0.02)

    def end_of(self, number: int, patience: float) -> int:
        """The exit code of a generators' node after the run's end. One that came too late for it waits for learners, as it
        should: it is told to leave."""
        job, deadline = self.jobs[number], time.monotonic() + patience
        while job.poll() is None:
            last_start = Path(self.consoles[number].name).read_text().rpartition("importing torch and transformers")[2]
            if "engine: " not in last_start:  # it says so once it has found learners
                job.send_signal(signal.SIGTERM)
                job.wait(patience)
                return 0
            if time.monotonic() > deadline:
                raise SystemExit(f"node{number + 1} does not end with the run: see {self.run.parent}")
            time.sleep(0.1)
        return job.returncode


def strike(cluster: Cluster, rng: random.Random) -> str:
    """Takes a node away once, and gives back what can be given back; returns which and how."""
    number = rng.choice([0, 1, 1, 2, 2] if cluster.args.learners else [1, 2])
    machine = cluster.network.nodes[number]
    how = rng.choice(["unplugged", "powered off", "killed", "stopped", "told to leave"])
    if how == "unplugged":
        machine.unplug()
        time.sleep(rng.uniform(0.5, 9))
        machine.plug_in()
    elif how == "powered off":
        machine.power_off()
        cluster.jobs[number].kill()
        cluster.jobs[number].wait()
        time.sleep(rng.uniform(0, 6))
        cluster.network.replace(number)
    elif how == "killed":
        for pid in machine.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    elif how == "stopped":
        pids = list(machine.processes())
        for word, pause in ((signal.SIGSTOP, rng.uniform(0.5, 9)), (signal.SIGCONT, 0)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, word)
            time.sleep(pause)
    else:
        cluster.jobs[number].send_signal(signal.SIGTERM)
        cluster.jobs[number].wait(60)
    return f"{machine.name} {how}"


def main(args: Args, fresh: bool) -> Path:
    """fresh: as helpers.command has it. Returns the run's directory."""
    rng, out, told = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="losses-")), Counter()
    with Network(3) as network:
        cluster = Cluster(network, out, args, fresh)
        for number in range(3):
            cluster.start(number)
        for loss in range(args.losses):
            cluster.wait_for_steps(rng.randrange(1, 4), args.patience)
            time.sleep(rng.uniform(0, 0.5))
            begun = time.monotonic()
            what = strike(cluster, rng)
            told[what.partition(" ")[2]] += 1
            struck = time.monotonic() - begun
            cluster.wait_for_steps(1, args.patience)
            print(
                f"{loss + 1}/{args.losses}: {what} for {struck:.1f} s; step {cluster.step()} after "
                f"{time.monotonic() - begun:.1f} s",
                flush=True,
            )
        cluster.jobs[0].send_signal(signal.SIGTERM)  # it leaves a checkpoint, from which a run of so many steps ends
        cluster.jobs[0].wait(60)
        cluster.steps = cluster.step() + 10
        for number in (0, 1, 2):
            cluster.jobs[number].send_signal(signal.SIGTERM)
            cluster.jobs[number].wait(60)
            cluster.start(number)
        step, deadline = -1, 0.0
        while (code := cluster.jobs[0].poll()) is None:
            if cluster.step() > step:
                step, deadline = cluster.step(), time.monotonic() + args.patience
            if time.monotonic() > deadline:
                raise SystemExit(f"the run does not end: see {out}")
            time.sleep(0.1)
        assert code == 0, f"exit code {code}: see {out}"
        for number in (1, 2):
            code = cluster.end_of(number, 60)
            assert code == 0, f"node{number + 1} ended with exit code {code}: see {out}"
        deadline = time.monotonic() + 15
        while (left := network.left_over()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left
    assert "tickets started = " in (out / "node1.txt").read_text(), "no account"
    print(
        f"{args.losses} losses ({', '.join(f'{n} {what}' for what, n in sorted(told.items()))}): "
        f"{audit(cluster.run, cluster.steps)}"
    )
    return cluster.run


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__), fresh=True)

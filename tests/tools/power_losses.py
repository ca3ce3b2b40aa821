"""Cuts the link of one machine of a job again and again at random moments, as a power loss does, gives the same command again
each time, and checks the files that the run leaves.

    python tests/tools/power_losses.py --losses 20

Two nodes learn, one generates; the victim is any of them. The job must end on the nodes that are left, as failed and with the
victim's name, within 40 seconds of the loss; on the victim, too; and leave nothing on any. test_nodes_net.py runs a few.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tyro
from helpers import ROOT
from kills import audit, saving, steps_of
from nodes import Job, Network

sys.path.insert(0, str(ROOT))
NODES = [(1, 0), (1, 0), (1, 1)]  # (ranks, generators)
END_SECONDS = 40.0


@dataclass
class Args:
    losses: int = 20
    """How many times to cut a link."""
    steps_between: int = 4
    """The run has this many steps a loss."""
    node_timeout: float = 20.0
    """As the script's --node-timeout."""
    seed: int = 0
    """Of the moments and the victims."""
    fresh: bool = True
    """Start Python as a user does, not as a fork of a process that has its imports."""
    timeout: float = 120.0
    """Seconds without a new step after which the run counts as stuck."""


def await_moment(job: Job, run: Path, rng: random.Random, timeout: float) -> str:
    """Returns at a random moment of the run, after its ranks have met. The run continues."""
    moment = rng.choices(["starting", "running", "saving"], [2, 5, 3])[0]
    before, deadline = steps_of(run), time.monotonic() + timeout

    def until(done) -> None:
        while not done():
            if time.monotonic() > deadline or any(process.poll() is not None for process in job.processes):
                job.end()
                raise SystemExit(f"the job did not come to {moment}, at step {steps_of(run)}: see {run}")
            time.sleep(1e-3)

    if moment == "starting":
        until(lambda: all("node " in job.console(number) for number in range(len(NODES))))
        time.sleep(rng.uniform(0, 3))
        return moment
    until(lambda: steps_of(run) > before)
    if moment == "running":
        time.sleep(rng.uniform(0, 0.5))
    else:
        until(lambda: saving(run))
        time.sleep(rng.uniform(0, 0.05))
    return moment


def lose_power(network: Network, job: Job, victim: int, node_timeout: float) -> float:
    """Cuts the node off; returns how many seconds later all nodes had ended."""
    node = network.nodes[victim]
    node.unplug()
    cut = time.monotonic()
    consoles = job.wait(END_SECONDS + 20)
    took = time.monotonic() - cut
    assert took < END_SECONDS, f"the job ended after {took:.0f} s"
    for number, (code, console) in enumerate(consoles):
        assert code, console
        if number != victim:
            assert f"node {victim + 1}, {node.name}" in console, console
    deadline = time.monotonic() + 10
    while (left := network.left_over()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left
    return took


def main(args: Args) -> str:
    """Raises AssertionError if a promise is broken; returns what was found."""
    rng, steps = random.Random(args.seed), args.steps_between * args.losses + 5
    out = Path(tempfile.mkdtemp(prefix="power-losses-"))
    run, seconds, struck = out / "run", [], Counter()
    flags = ["train_async.py", "--output-dir", out, "--experiment-name", "run", "--total-training-steps", steps, "--seed", 0]
    flags += ["--save-freq", 2, "--test-freq", 0, "--node-timeout", args.node_timeout, "--max-response-length", 32]
    flags += ["--staleness-threshold", 2, "--max-num-seqs", 64, "--max-staleness", 2]  # much in flight
    with Network(len(NODES)) as network:
        for number in range(args.losses):
            job = network.start([(n, [*flags, "--generators", g]) for n, g in NODES], fresh=args.fresh)
            moment, victim = await_moment(job, run, rng, args.timeout), rng.randrange(len(NODES))
            struck[f"node {victim + 1} {moment}"] += 1
            seconds.append(lose_power(network, job, victim, args.node_timeout))
            network.nodes[victim].plug_in()
            what = f"node {victim + 1}, {moment}, at step {steps_of(run)} of {steps}: all ended after {seconds[-1]:.1f} s"
            print(f"loss {number + 1}/{args.losses}: {what}", flush=True)
        job = network.start([(n, [*flags, "--generators", g]) for n, g in NODES], fresh=args.fresh)
        consoles = job.wait(args.timeout + steps)
        assert [code for code, _ in consoles] == [0] * len(NODES), consoles
        assert not network.left_over()
    assert not [*run.glob(".step_*")], "a half-written checkpoint is left"
    found = f"{args.losses} losses ({', '.join(f'{n} {what}' for what, n in sorted(struck.items()))})"
    return f"{found}, all nodes ended after at most {max(seconds):.1f} s: {audit(run, steps)}"


if __name__ == "__main__":
    print(main(tyro.cli(Args, description=__doc__)))

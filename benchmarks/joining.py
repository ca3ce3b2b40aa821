"""How soon a generator that joins a run (--elastic-generators) is at work: from the start of its torchrun to the first row of
metrics.jsonl that has its share.

    python benchmarks/joining.py        # writes benchmarks/results/joining.{json,md}

Machines of tests/tools/nodes.py, all on this one: one learns, one generates from the start, and on a third a member joins
again and again, and leaves by SIGTERM.
"""

import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from common import ROOT, logged, over, setting, table, words, write

sys.path.insert(0, str(ROOT / "tests" / "tools"))
from nodes import Network


@dataclass
class Args:
    joins: int = 5
    """How often the member joins."""
    flags: str = ""
    """More flags for train_async.py, such as --model."""


def until(done, jobs) -> float:
    """When `done` gave something, by the clock."""
    deadline = time.monotonic() + 300
    while not done():
        if time.monotonic() > deadline or any(job.poll() is not None for job in jobs):
            raise SystemExit("error: the run ended, or nobody joined: see the consoles")
        time.sleep(5e-3)
    return time.monotonic()


def measure(args: Args) -> list[dict]:
    found = []
    with tempfile.TemporaryDirectory() as out, Network(3) as network:
        flags = ["--elastic-generators", "10.77.0.1:29600", "--output-dir", out, "--experiment-name", "run", "--test-freq", 0]
        flags += ["--total-training-steps", 10**6, *args.flags.split(), "--generators"]
        rows = lambda: logged(Path(out) / "run" / "metrics.jsonl")  # noqa: E731
        with open(Path(out) / "learner.txt", "w+") as told, open(Path(out) / "members.txt", "w") as others:

            def start(node: int, generators: int):
                console = others if node else told
                return network.nodes[node].start("train_async.py", *flags, generators, ranks=1, fresh=True, console=console)

            jobs = [start(0, 0), start(1, 1)]
            until(lambda: any(row["step"] >= 3 for row in rows()), jobs)
            for number in range(2, 2 + args.joins):
                begun = time.monotonic()
                job = start(2, 1)
                let_in = until(lambda: f"(member {number}) have joined" in (Path(out) / "learner.txt").read_text(), jobs)  # noqa: B023
                at_work = until(lambda: f"ledger/generator_{number}.0/generate" in rows()[-1], jobs)  # noqa: B023
                found.append({"let_in": let_in - begun, "at_work": at_work - begun})
                print(found[-1], flush=True)
                job.send_signal(signal.SIGTERM)
                job.wait(60)
    return found


def main(args: Args) -> None:
    found, under = measure(args), setting()
    row = [over([one[what] for one in found], ".1f") for what in ("let_in", "at_work")]
    text = table(["a generator joins: seconds until it is let in", "until it is at work"], [row])
    write("joining", {"setting": under, "args": asdict(args), "joins": found}, f"{text}\n\n{words(under)}.")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

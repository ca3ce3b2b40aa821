"""The demo in three modes, three seeds each, and the report of them: the example in examples/report.

python benchmarks/scripts/report_demo.py     # the runs stay in runs/report_demo, the report is in examples/report
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import MODES, ROOT, threads_of


@dataclass
class Args:
    seeds: int = 3
    """Runs of each mode, with seeds 0, 1, 2, ..."""
    steps: int = 60
    """Training steps of each."""
    runs: Path = Path("runs/report_demo")
    """Where the runs go; it must not exist yet."""
    output: Path = Path("examples/report")
    """Where the report goes."""


def main(args: Args) -> None:
    if (ROOT / args.runs).exists():
        sys.exit(f"error: {args.runs} exists. Remove it, or give another --runs.")
    for seed in range(args.seeds):
        for mode, command in MODES.items():  # interleaved, so that a slow hour is everyone's
            name = f"{mode.replace(' ', '_')}-{seed}"
            flags = ["--seed", str(seed), "--total-training-steps", str(args.steps), "--experiment-name", name]
            env = os.environ | {"OMP_NUM_THREADS": str(threads_of(command))}
            subprocess.run([sys.executable, *command, *flags, "--output-dir", str(args.runs)], cwd=ROOT, env=env, check=True)
    report = ["report.py", str(args.runs), "--speedup", "train_sync", "--title", "The demo in three modes"]
    subprocess.run([sys.executable, *report, "--output", str(args.output)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

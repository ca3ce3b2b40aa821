"""The demo over several seeds: accuracy before and after, seconds, and the plot in the README.

python benchmarks/demo.py            # about 5 minutes on 2 cores; writes benchmarks/results/demo.{json,md,png}
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ACCURACY = "val-core/demo/acc/mean@1"


@dataclass
class Args:
    seeds: int = 5
    """How many runs, with seeds 0, 1, 2, ..."""
    steps: int = 200
    """Training steps of each."""


def one_run(seed: int, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "train_sync.py",
            "--seed",
            str(seed),
            "--total-training-steps",
            str(steps),
            "--output-dir",
            out,
        ]
        started = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        (run,) = Path(out).iterdir()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        config = json.loads((run / "config.json").read_text())
    return {
        "seed": seed,
        "seconds": seconds,
        "training_seconds": sum(row["perf/time_per_step"] for row in rows if row["step"]),
        "reward": [row["critic/score/mean"] for row in rows if row["step"]],
        "accuracy": {row["step"]: row[ACCURACY] for row in rows if ACCURACY in row},
        "cpu": config["hardware"]["cpu"],
        "threads": config["hardware"]["threads_per_rank"],
    }


def table(runs: list[dict]) -> str:
    lines = ["| seed | greedy accuracy before | after | seconds, all | seconds, training |", "|---|---|---|---|---|"]
    for r in runs:
        first, *_, last = r["accuracy"].values()
        lines.append(f"| {r['seed']} | {first:.3f} | {last:.3f} | {r['seconds']:.0f} | {r['training_seconds']:.0f} |")
    return "\n".join(lines) + f"\n\n{runs[0]['cpu']}, {runs[0]['threads']} threads, Python {platform.python_version()}.\n"


def plot(runs: list[dict], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    for r in runs:
        axes.plot(list(r["accuracy"]), list(r["accuracy"].values()), marker="o", ms=3, label=f"seed {r['seed']}")
    axes.set(xlabel="step", ylabel="greedy validation accuracy", ylim=(0, 1), title="train_sync.py on the demo")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target)


def main(args: Args) -> None:
    sys.path.insert(0, str(ROOT))
    from rl.demo import model_dir

    model_dir()  # made before the clock starts
    RESULTS.mkdir(exist_ok=True)
    runs = []
    for seed in range(args.seeds):
        runs.append(one_run(seed, args.steps))
        print(table(runs).splitlines()[-3], flush=True)
    (RESULTS / "demo.json").write_text(json.dumps(runs))
    (RESULTS / "demo.md").write_text(table(runs))
    plot(runs, RESULTS / "demo.png")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

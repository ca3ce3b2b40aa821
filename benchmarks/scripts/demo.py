"""The demo in three modes over several seeds: accuracy before and after, seconds, and the plot in docs/benchmarks.md.

python benchmarks/scripts/demo.py                    # about 20 minutes on 2 cores; writes benchmarks/results/demo.{json,md,png}
python benchmarks/scripts/demo.py --model demo-vl    # the demo with images; writes demo-vl.{json,md,png}
"""

import platform
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import MODES, RESULTS, accuracies, over, run_script, write
from common import table as markdown


@dataclass
class Args:
    model: Literal["demo", "demo-vl"] = "demo"
    """Which demo."""
    seeds: int = 5
    """How many runs of each mode, with seeds 0, 1, 2, ..."""
    steps: int = 200
    """Training steps of each."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """What generates; the results of vllm are written under <model>_vllm."""


def one_run(mode: str, seed: int, args: Args) -> dict:
    from rl.ranks.host import cpu_name

    flags = ["--model", args.model, "--seed", str(seed), "--total-training-steps", str(args.steps), "--engine", args.engine]
    done, rows = run_script(sys.executable, MODES[mode], *flags)
    began = rows[0]["time"] - rows[0]["timing_s/step"]
    return {
        "mode": mode,
        "seed": seed,
        "seconds": done.seconds,
        "training_seconds": rows[-1]["time"] - began,
        "reward": [row["critic/score/mean"] for row in rows if row["step"]],
        "clock": [row["time"] - began for row in rows if row["step"]],
        "accuracy": accuracies(done.validations),
        "cpu": cpu_name(),
    }


def table(runs: list[dict]) -> str:
    head, rows = ["mode", "greedy accuracy before", "after", "seconds, all", "seconds, training"], []
    for mode in MODES:
        of = [r for r in runs if r["mode"] == mode]
        if of:
            first, last = ([list(r["accuracy"].values())[i] for r in of] for i in (0, -1))
            times = [over([r[key] for r in of], ".0f") for key in ("seconds", "training_seconds")]
            rows.append([mode, over(first, ".3f"), over(last, ".3f"), *times])
    seeds = len({r["seed"] for r in runs})
    machine = f"{runs[0]['cpu']}, 2 cores, Python {platform.python_version()}"
    return f"{markdown(head, rows)}\n\n{seeds} seeds, median (min - max). {machine}."


def plot(runs: list[dict], target: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), dpi=110)
    left, right = figure.subplots(1, 2)
    for i, mode in enumerate(MODES):
        for r in [r for r in runs if r["mode"] == mode]:
            label = mode if r["seed"] == 0 else None
            left.plot(list(r["accuracy"]), list(r["accuracy"].values()), color=f"C{i}", lw=1, label=label)
            smooth = [statistics.mean(r["reward"][max(0, k - 9) : k + 1]) for k in range(len(r["reward"]))]
            right.plot(r["clock"], smooth, color=f"C{i}", lw=1, label=label)
    left.set(xlabel="step", ylabel="greedy validation accuracy", ylim=(0, 1))
    right.set(xlabel="seconds", ylabel="training reward (mean of 10 steps)", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(target)


def main(args: Args) -> None:
    from rl.model.pretrained import resolve

    resolve(args.model)  # made before the clock starts
    runs = []
    for seed in range(args.seeds):
        for mode in MODES:  # interleaved
            runs.append(one_run(mode, seed, args))
        name = f"{args.model}_vllm" if args.engine == "vllm" else args.model
        write(name, runs, table(runs))
        plot(runs, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""Learning with and without a replayed router: the demo's mixture of experts, a bf16 generator and an fp32 learner, 5 seeds.

python benchmarks/scripts/moe.py       # about 20 minutes on 2 cores; writes benchmarks/results/moe.{json,md}
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import MODES, RESULTS, accuracies, by_seed, over, run_script, setting, table, words, write

SIDES = {
    "fp32 generator": ("--rollout-dtype", "float32"),
    "bf16 generator, `--router-replay off`": (),
    "bf16 generator, `--router-replay R3`": ("--router-replay", "R3"),
    "bf16 generator, two updates a batch, `off`": ("--ppo-epochs", "2"),
    "bf16 generator, two updates a batch, `R2`": ("--ppo-epochs", "2", "--router-replay", "R2"),
    "bf16 generator, two updates a batch, `R3`": ("--ppo-epochs", "2", "--router-replay", "R3"),
}
SHOWN = {  # mean over a run's steps of a metric
    "rollout_corr/k3_kl": ".2e",
    "training/rollout_probs_diff_max": ".3f",
    "actor/grad_norm": ".2f",
}


@dataclass
class Args:
    seeds: int = 5
    """How many runs of each side, with seeds 0, 1, 2, ..."""
    steps: int = 60
    """Training steps of each, validated at every 20."""
    out: Path = RESULTS
    """Directory for the results."""


def one_run(side: str, seed: int, steps: int) -> dict:
    flags = ["--model", "demo-moe", "--rollout-dtype", "bfloat16", "--seed", str(seed), "--total-training-steps", str(steps)]
    flags += ["--test-freq", "20", "--lr-scheduler-type", "constant", *SIDES[side]]
    done, rows = run_script(sys.executable, MODES["sync"], *flags)
    means = {name: statistics.mean(row[name] for row in rows if row["step"]) for name in SHOWN}
    return {"accuracy": accuracies(done.validations), **means}


def main(args: Args) -> None:
    from examples.demo.sums import model_dir

    model_dir("demo-moe")  # made before anything else
    machine = setting(seeds=args.seeds)
    runs = by_seed(SIDES, args.seeds, lambda side, seed: one_run(side, seed, args.steps))
    steps = list(next(iter(runs.values()))[0]["accuracy"])
    head = ["", *(f"accuracy at {step}" for step in steps), *(f"`{name}`" for name in SHOWN)]
    rows = [
        [side, *(over([run["accuracy"][step] for run in its], ".3f") for step in steps)]
        + [over([run[name] for run in its], form) for name, form in SHOWN.items()]
        for side, its in runs.items()
    ]
    says = f"Greedy validation accuracy, and means over the steps; {args.seeds} seeds, median (min - max). {words(machine)}."
    write("moe", {"setting": machine, "runs": runs}, f"{table(head, rows)}\n\n{says}", args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

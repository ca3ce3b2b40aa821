"""The cost of saving: the same run with a checkpoint after every step and with none, in train_sync.py and train_async.py.

    python benchmarks/scripts/checkpoint.py        # about 6 minutes on 2 cores; writes benchmarks/results/checkpoint.{json,md}

"stall" is what a step waits for the checkpoint of the step before (timing_s/save_checkpoint): copies of weights and moments,
and in a stream what is under way in the generators. "step" is the whole step, during which the rest is written in the
background, on the same cores. A random model of 30M parameters, 8 prompts x 8 responses of 32 tokens; a checkpoint is 0.5 GB.
"""

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import MODES, RESULTS, Rounds, of_fixed_length, over, random_model, ratios, run_script, setting, table, words, write

SIDES = {"none": "0", "every 4 steps": "4", "every step": "1"}  # --save-freq


@dataclass
class Args:
    rounds: int = 3
    """Interleaved runs of each side."""
    steps: int = 12
    """Steps of each run; the first two and the last, whose checkpoint nobody waits for, do not count."""
    minutes: float = 12
    """No round begins that would end later than this."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


def one_run(mode: str, model: str, steps: int, save_freq: str) -> dict[str, float]:
    flags = ["--model", model, "--train-files", "demo", "--test-freq", "0", "--max-response-length", "32"]
    flags += ["--total-training-steps", str(steps), "--save-freq", save_freq, "--max-ckpt-to-keep", "1"]
    _, rows = run_script(sys.executable, of_fixed_length(MODES[mode]), *flags)
    counted = [row for row in rows if 2 < row["step"] < steps]
    stalls = [row["timing_s/save_checkpoint"] for row in counted if "timing_s/save_checkpoint" in row]
    out = {"step": statistics.mean(row["timing_s/step"] for row in counted)}
    return out | {"stall": statistics.median(stalls) if stalls else 0.0}


def main(args: Args) -> None:
    runs = {mode: {side: [] for side in SIDES} for mode in ("sync", "async")}
    with tempfile.TemporaryDirectory() as model:
        parameters = random_model(model, hidden=512, layers=8, vocabulary=64)
        for _ in Rounds(args.rounds, args.minutes):
            for mode, sides in runs.items():
                for side, save_freq in SIDES.items():
                    sides[side].append(one_run(mode, model, args.steps, save_freq))
                    print(f"{mode}, {side}: {sides[side][-1]}", flush=True)
    here, lines = setting("transformers", parameters=parameters), []
    for mode, sides in runs.items():
        base = [run["step"] for run in sides["none"]]
        for side, its in sides.items():
            steps = [run["step"] for run in its]
            stall = [run["stall"] / run["step"] for run in its] if side != "none" else []
            lines.append([mode, side, over(steps), over(ratios(steps, base)), over(stall, ".1%") if stall else "-"])
    text = table(["mode", "checkpoints", "s a step", "over none", "stall, of a step"], lines)
    write("checkpoint", {"setting": here, "runs": runs}, f"{text}\n\n{words(here)}; median (min - max)", args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""Seconds from the command to the first step of the demo, in each mode, warm: the model is made, the files are in memory.

    python benchmarks/scripts/startup.py          # about 8 minutes on 2 cores; writes benchmarks/results/startup.{json,md}

"begins" is when the first training step begins (with sync: its generation), as the scripts are run by default, that is after a
validation of 500 prompts with sync, during it with the split modes; "done" is when the step is. "no validation" is the same
with --no-val-before-train. "first line" is when anything is printed: that the imports begin. Below, how long the demo's model
takes to be made, once, by the first run of all; and what single imports cost, in processes of their own.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import MODES, RESULTS, ROOT, Rounds, over, run_script, setting, table, words, write

IMPORTS = {
    "python alone": "pass",
    "torch": "import torch",
    "transformers, two names": "from transformers import AutoConfig, AutoModelForCausalLM",
    "datasets": "import datasets",
    "train_sync.py's": "import train_sync",
    "train_async.py's": "import train_async",
}


@dataclass
class Args:
    rounds: int = 4
    """Runs of each mode; the first round is not counted."""
    minutes: float = 15
    """No round begins that would end later than this."""
    makings: int = 1
    """How often the demo's model is made in each mode."""
    engine: Literal["embedded", "vllm"] = "embedded"
    """What generates; the results of vllm are written under startup_vllm."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


def one_run(mode: str, engine: str, *flags: str) -> dict[str, float]:
    command = MODES[mode]
    done, rows = run_script(sys.executable, command, "--total-training-steps", "2", "--engine", engine, *flags)
    first = next(row for row in rows if row["step"] == 1)
    began = first["time"] - first["timing_s/step"] - done.started
    return {"first line": done.first_line, "begins": began, "done": first["time"] - done.started}


def making_seconds(mode: str) -> float:
    with tempfile.TemporaryDirectory() as cache:
        flags = ["--total-training-steps", "1", "--test-freq", "0"]
        run_script(sys.executable, MODES[mode], *flags, RL_CACHE=cache)
        (made,) = Path(cache).glob("*/made.json")
        return json.loads(made.read_text())["seconds"]


def import_seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - started


def main(args: Args) -> None:
    from examples.demo.sums import model_dir

    model_dir()
    here = setting("transformers")
    runs: dict[str, list[dict]] = {mode: [] for mode in MODES}
    bare: dict[str, list[dict]] = {mode: [] for mode in MODES}
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for number in Rounds(args.rounds, args.minutes):
        for mode in MODES:
            one, other = one_run(mode, args.engine), one_run(mode, args.engine, "--no-val-before-train", "--test-freq", "0")
            print(f"{mode}: first step done after {one['done']:.1f} s, {other['done']:.1f} s without validation", flush=True)
            if number:
                runs[mode].append(one)
                bare[mode].append(other)
        for name, code in IMPORTS.items():
            took = import_seconds(code)
            if number:
                imports[name].append(took)
    makings = {mode: [making_seconds(mode) for _ in range(args.makings)] for mode in MODES} if args.makings else {}
    shown = [(runs, "first line"), *((of, key) for of in (runs, bare) for key in ("begins", "done"))]
    rows = [[mode, *(over([one[key] for one in of[mode]], ".1f") for of, key in shown)] for mode in MODES]
    head = ["mode", "first line, s", "first step begins, s", "is done, s", "no validation: begins", "is done"]
    making = [[f"{mode}: making the model", over(values, ".1f")] for mode, values in makings.items()]
    single = [[name, over(values)] for name, values in imports.items()]
    text = "\n\n".join([table(head, rows), *[table(["once", "seconds"], making)] * bool(making)])
    text += f"\n\n{table(['import', 'seconds'], single)}\n\n{words(here)}; median (min - max)"
    data = {"setting": here, "runs": runs, "no_validation": bare, "makings": makings, "imports": imports}
    data["median_done"] = {mode: statistics.median(one["done"] for one in runs[mode]) for mode in MODES}
    write("startup" if args.engine == "embedded" else "startup_vllm", data, text, args.out)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

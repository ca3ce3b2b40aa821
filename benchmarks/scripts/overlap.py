"""Do generation and training overlap, and what do the three modes make of long-tailed lengths? Interleaved in one run.

    python benchmarks/scripts/overlap.py         # about 15 minutes on 2 cores; writes benchmarks/results/overlap.{json,md}

Two ranks of one thread, the demo's model, response lengths drawn per response (end tokens are ignored).
First table: every response of one length, with which training takes about as long as generation. "generation" is
train_async.py whose learner does not train, "training" the same with responses that cost nothing to make. The cores of a
virtual machine are not independent: "training, other core busy" has a second process that multiplies matrices, and is what
overlap can at best reach.
Second table: log-normal lengths, the longest ten times the median; async also further ahead of the learner than by default.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tyro
from common import ROOT, over, ratios, table, torchrun, write

from rl.flags import read

sys.path.insert(0, str(ROOT / "tests" / "tools"))

BUSY = "training, other core busy"
SPIN = "import torch; torch.set_num_threads(1); a = torch.randn(400, 400)\nwhile True: a @ a"
SCRIPTS = {"sync": "train_sync", "one step off": "train_one_step_off"}  # every other side is train_async
TAILED = {"sync": (), "one step off": (), "async": ()}  # the sides of the second table, and their flags
TAILED |= {f"async, {ahead} steps ahead": ("--staleness-threshold", str(ahead)) for ahead in (2, 3)}


@dataclass
class Args:
    steps: int = 18
    """Training steps of each run; the first third is not counted."""
    repeats: int = 3
    """Runs of each side."""
    length: int = 64
    """Tokens of each response in the first table."""
    median: int = 24
    """Median tokens of a response in the second; the longest has ten times as many."""


def length_of(seed: int, median: int, longest: int) -> int:
    """A length that depends on the response's own seed: log-normal with sigma 0.9, cut at the longest."""
    z = np.random.default_rng(seed).standard_normal()
    return max(1, min(longest, round(median * math.exp(0.9 * z))))


def patched(side: str, median: int, longest: int) -> None:
    """Runs a script within this process, under torchrun, with lengths given and, for two sides, one half left out."""
    import dataclasses
    import importlib
    from unittest.mock import patch

    from scripted import ScriptedEngine

    from rl.generation import make
    from rl.generation.embedded import TransformersEngine
    from rl.ranks import process
    from rl.split import init_split
    from rl.training_run import TrainingRun

    name = SCRIPTS.get(side, "train_async")
    script = importlib.import_module(name)
    engine_type = ScriptedEngine if side in ("training", BUSY) else TransformersEngine
    add = engine_type.add

    def add_of_a_length(engine, request):
        n = longest if longest == median else length_of(request.seed, median, longest)
        sampling = dataclasses.replace(request.sampling, max_tokens=n, ignore_eos=True)
        add(engine, dataclasses.replace(request, sampling=sampling))

    engine_type.add = add_of_a_length
    if side in ("training", BUSY):
        patch.object(make, "make_engine", lambda *_, **__: Instant()).start()  # raises if there is no such name
    if side == "generation":
        patch.object(script, "learn", lambda *_: {}).start()
        patch.object(TrainingRun, "report", lambda *_: {}).start()  # of what was trained
    args = read(script.Args, args=sys.argv[4:])
    if name == "train_sync":
        process.run(lambda ranks: script.main(args, ranks))
    else:
        process.run(lambda split: script.main(args, split), join=lambda: init_split(1))


def Instant():
    """An engine whose responses cost nothing: random tokens, all finished at the first step."""
    import torch
    from scripted import ScriptedEngine

    from rl.generation.engine import Output

    class Engine(ScriptedEngine):
        shares_memory, device = False, torch.device("cpu")

        def __init__(self):
            super().__init__(None, eos_token_id=1)
            self.requests, self.weights = [], {}

        def add(self, request):
            self.requests.append(request)

        def step(self):
            done, self.requests = self.requests, []
            sizes = [r.sampling.max_tokens for r in done]
            tokens = [np.random.default_rng(r.seed).integers(4, 14, n).tolist() for r, n in zip(done, sizes, strict=True)]
            return [
                Output(r.id, t, [-2.3] * n, [self.version] * n, "length") for r, t, n in zip(done, tokens, sizes, strict=True)
            ]

        def update(self, weights, version, recompute_kv=False):
            self.weights, self.version = dict(weights), version

        def read_back(self, name):
            return self.weights[name]

        def own_part(self, name, whole):
            return whole

        @property
        def num_unfinished(self):
            return len(self.requests)

    return Engine()


def one_run(side: str, args: Args, median: int, longest: int, *flags: str) -> dict:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *torchrun(__file__), "--side", side, f"{median}/{longest}", "--output-dir", out]
        command += ["--total-training-steps", str(args.steps), "--test-freq", "0"]
        # Scores of such random text are all 0, and training would be a forward pass.
        command += ["--max-response-length", str(longest), "--backward-without-advantage", *flags]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        neighbour = subprocess.Popen([sys.executable, "-c", SPIN]) if side == BUSY else None
        try:
            subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
        finally:
            if neighbour:
                neighbour.kill()
        (run,) = Path(out).iterdir()
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][args.steps // 3 :]
    seconds = [row["timing_s/step"] for row in rows]
    tokens = [row["perf/total_num_tokens"] for row in rows]
    idle = [row.get("fully_async/trainer/idle_ratio", 0.0) for row in rows]
    return {"step": statistics.mean(seconds), "tokens_per_s": sum(tokens) / sum(seconds), "idle": statistics.mean(idle)}


def main(args: Args) -> None:
    from examples.demo.sums import model_dir
    from rl.ranks.host import cpu_name

    model_dir()
    equal: dict[str, list[dict]] = {side: [] for side in ("generation", "training", BUSY, "async")}
    tailed: dict[str, list[dict]] = {side: [] for side in TAILED}
    for repeat in range(args.repeats):
        for side in equal:
            equal[side].append(one_run(side, args, args.length, args.length))
        for side in tailed:
            tailed[side].append(one_run(side, args, args.median, 10 * args.median, *TAILED[side]))
        print(f"round {repeat + 1} of {args.repeats}", flush=True)
    rounds = [{side: runs[i]["step"] for side, runs in equal.items()} for i in range(args.repeats)]
    alone = [r["async"] / max(r["generation"], r["training"]) for r in rounds]
    beside = [r["async"] / max(r["generation"], r[BUSY]) for r in rounds]
    first = [[side, over([r["step"] for r in runs], ".3f")] for side, runs in equal.items()]
    first += [["async over the longer of generation and training", over(alone)]]
    first += [["async over the longer of generation and training with a busy core", over(beside)]]
    second = []
    for side, runs in tailed.items():
        rates, base = ([r["tokens_per_s"] for r in of] for of in (runs, tailed["sync"]))
        waits = f"{statistics.median(r['idle'] for r in runs):.0%}"
        second.append([side, over(rates, ",.0f"), over(ratios(rates, base)), waits])
    machine = f"{cpu_name()}, 2 ranks of one thread; {args.repeats} interleaved rounds, median (min - max)"
    tables = [table(["side", "seconds a step"], first), table(["mode", "tokens/s", "over sync", "learner waits"], second)]
    write("overlap", {"equal": equal, "tailed": tailed}, "\n\n".join([*tables, f"{machine}."]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        patched(sys.argv[2], *map(int, sys.argv[3].split("/")))
    else:
        main(tyro.cli(Args, description=__doc__))

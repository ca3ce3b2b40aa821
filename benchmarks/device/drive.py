"""The measurements for an accelerator, step by step. One that fails, or takes too long, does not end the others.

    python benchmarks/device/drive.py 1 2 3                       # all parts, an hour or less on one GPU
    python benchmarks/device/drive.py 1 --only learner,engine     # steps whose names contain one of these words
    python benchmarks/device/drive.py 1 2 --toy                   # tiny sizes on any machine, to see that each step runs

README.md lists the parts, and says how a machine without a network runs them. Writes into $OUT, by default out/:
results.jsonl (a line a step, as it ends), table.md, doctor.json, profile.txt, logs.tar.gz. Models, runs and logs lie in
$KIT_WORK, by default out/work. Each step is a process of its own with a time limit. Exit code 1 if one that ran failed.
"""

import argparse
import collections
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import ROOT, accuracies, logged
from device.steps import Phase, Plan, Step
from device.table import markdown

from rl.ranks import device

LEAST = 15  # seconds without which no step is begun
OF_RUN = ("actor/grad_norm", "perf/max_memory_reserved_gb", "publish/seconds", "publish/gb_per_s", "perf/mfu/actor")
OF_RUN += ("fully_async/trainer/idle_ratio", "fully_async/rollouter/idle_ratio")
TIMES = "timing_s/"


@dataclass
class Driver:
    out: Path
    work: Path
    deadline: float = float("inf")  # seconds since 1970
    records: list[dict] = field(default_factory=list)

    def go(self, phases: list[Phase]) -> None:
        """Run the steps of each phase, some at once, and record each as it ends."""
        for at_once, steps in phases:
            waiting = collections.deque(steps)
            running: list[Step] = []
            while waiting or running:
                while waiting and len(running) < at_once:
                    step = waiting.popleft()
                    late = "no time was left" if self.deadline - time.time() < LEAST else ""
                    if why := step.missing or late:
                        self.keep({"step": step.name, "code": None, "seconds": 0, "why": why, "found": {}, "warnings": []})
                    else:
                        self.start(step)
                        running.append(step)
                for step in [*running]:
                    code = step.process.poll()
                    if code is None and time.time() < min(step.began + step.limit, self.deadline):
                        continue
                    if code is None:
                        end(step.process)
                    running.remove(step)
                    self.keep(record(step, code, self.log(step)))
                time.sleep(0.1)

    def log(self, step: Step) -> Path:
        return self.work / "logs" / ("".join(c if c.isalnum() or c in ".-" else "_" for c in step.name) + ".txt")

    def start(self, step: Step) -> None:
        self.log(step).parent.mkdir(parents=True, exist_ok=True)
        output = {"stdout": self.log(step).open("wb"), "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        step.process = subprocess.Popen(step.command, cwd=ROOT, env=os.environ | step.env, start_new_session=True, **output)
        step.began = time.time()

    def keep(self, found: dict) -> None:
        """Write all that is known so far: the next step may end the machine."""
        self.records.append(found)
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        (self.out / "table.md").write_text(markdown(self.records))
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as tar:
            for pattern in ("logs/*.txt", "runs/*/*/*.jsonl", "runs/*/*/config.json"):
                for path in self.work.glob(pattern):
                    if path.stat().st_size < 2**21:
                        tar.add(path, path.relative_to(self.work))
        result = "ok" if found["code"] == 0 else found["why"] or f"code {found['code']}"
        print(f"{found['step']}: {result}, {found['seconds']} s", flush=True)


def end(process: subprocess.Popen) -> None:
    """End a step's own processes."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, which)
            process.wait(4)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def record(step: Step, code: int | None, log: Path) -> dict:
    """Return what a step has found: its last line of JSON, and what its run has recorded. code: None if it was stopped."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    found = json.loads(next((line for line in reversed(lines) if line.startswith('{"')), "{}"))  # warnings may follow it
    if step.run:
        found |= of_run(step.run)
    if step.name.startswith(("doctor", "tests", "SmolLM2")):
        found["said"] = [line for line in lines if line.startswith(("slow", "WRONG"))] + [line[:300] for line in lines[-1:]]
    warned = [line[:300] for line in lines if line.lower().startswith(("warning", "error")) or "Warning:" in line]
    out = {"step": step.name, "code": 124 if code is None else code, "seconds": round(time.time() - step.began, 1)}
    out |= {"why": "stopped at its time limit" if code is None else "", "found": found}
    out["warnings"] = list(dict.fromkeys(warned))[:8]
    return out if code == 0 else out | {"end": "\n".join(lines[-25:])[-3000:]}


def of_run(run: Path) -> dict:
    """Return what a training run has recorded: accuracies by step, how far engine and learner differ in the first step, and
    medians of the last two thirds of the steps."""
    files = sorted(run.glob("*/metrics.jsonl"))
    rows = [row for row in logged(files[-1]) if row.get("step")] if files else []
    if not rows:
        return {"steps": 0}
    middle = rows[len(rows) // 3 :]

    def median(key: str) -> float | None:
        values = [row[key] for row in middle if isinstance(row.get(key), float | int)]
        return round(statistics.median(values), 4) if values else None

    accuracy = {str(step): value for step, value in accuracies(logged(files[-1].with_name("validations.jsonl"))).items()}
    seconds = sum(row.get(f"{TIMES}step", 0) for row in middle)
    rate = sum(row.get("perf/total_num_tokens", 0) for row in middle) / seconds if seconds else None
    out = {"steps": len(rows), "accuracy": accuracy, "tokens_per_s": rate} | {key: median(key) for key in OF_RUN}
    out["probs_diff_mean, first step"] = rows[0].get("training/rollout_probs_diff_mean")
    return out | {
        "seconds": {key.removeprefix(TIMES): value for key in rows[-1] if key.startswith(TIMES) and (value := median(key))}
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", type=int, choices=(1, 2, 3))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time")
    parser.add_argument("--only", default="", help="words with commas between them: steps whose names contain one of them")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on any machine")
    args = parser.parse_args()
    if device.kind() == "cpu" and not args.toy:
        sys.exit("error: there is no accelerator, so nothing is measured. --toy shows that each step runs.")
    out = Path(os.environ.get("OUT") or ROOT / "out").resolve()
    driver = Driver(out, Path(os.environ.get("KIT_WORK") or out / "work").resolve(), time.time() + args.seconds)
    for part in args.parts:
        phases = Plan(driver.work, out, args.toy).part(part)
        for _, steps in phases:
            steps[:] = [step for step in steps if any(word in step.name for word in args.only.split(","))]
            for step in steps:
                step.limit *= 10 if args.toy else 1  # that machine may be busy
        driver.go(phases)
    print(markdown(driver.records)[-11_000:])
    return int(any(found["code"] for found in driver.records))


if __name__ == "__main__":
    sys.exit(main())

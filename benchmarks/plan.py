"""Is the plan right? Step times that it predicts from a calibration, against those of real runs. Needs a quiet machine.

    python benchmarks/plan.py            # about 12 minutes on 2 cores; writes benchmarks/results/plan.{json,md}

Two ranks of one thread, the demo's model, response lengths drawn per response (end tokens are ignored). The parts are measured
once, split and colocated (rl/plan/calibrate.py); every case is then simulated and run. What the simulation is told beside the
parts: the flags, and the lengths that the run will draw. Fitted to the runs that it is compared with: nothing.
"""

import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from common import RESULTS, ROOT, setting, table, words, write
from scripts.overlap import Args as RunArgs
from scripts.overlap import length_of, one_run

from rl.record.provenance import commit

SCRIPTS = {"sync": "train_sync", "one step off": "train_one_step_off", "async": "train_async"}
SEQS = ["--max-num-seqs", "128"]
SLOW = ["--reward", f"{ROOT}/benchmarks/common.py:fifty_milliseconds", "--reward-workers", "4"]
SLOW_SECONDS = 0.05
PROMPT = 8  # tokens of the demo's prompts, about


@dataclass(frozen=True)
class Case:
    work: str  # cases of the same work are compared with each other
    mode: str
    median: int  # tokens of a response
    longest: int  # the same: all responses have this length
    prompts: int = 8  # a step
    threshold: float = 1.0
    period: int = 1
    slots: int = 128
    slow: bool = False

    @property
    def flags(self) -> list[str]:
        batch = "--ppo-mini-batch-size" if self.mode == "async" else "--train-batch-size"
        out = [batch, str(self.prompts), "--max-num-seqs", str(self.slots), *(SLOW if self.slow else ())]
        if self.mode == "async":
            out += ["--staleness-threshold", str(self.threshold), "--publish-every", str(self.period)]
        return out

    @property
    def name(self) -> str:
        return f"{self.mode} {self.threshold:g}/{self.period}" if self.mode == "async" else self.mode


def cases() -> list[Case]:
    out = []
    for work, shape in {
        "fixed 64": {"median": 64, "longest": 64},
        "long tail": {"median": 24, "longest": 240},
        "16 short prompts": {"median": 12, "longest": 120, "prompts": 16},
    }.items():
        out += [Case(work, mode, **shape) for mode in SCRIPTS]
    tail = {"median": 24, "longest": 240}
    out += [Case("long tail", "async", threshold=t, **tail) for t in (0, 0.5, 2)]
    out += [Case("long tail", "async", threshold=0.5, period=2, **tail)]
    out += [Case("long tail, 32 slots", "async", slots=32, **tail), Case("long tail, 32 slots", "sync", slots=32, **tail)]
    out += [Case("long tail, slow reward", mode, slow=True, **tail) for mode in ("sync", "async")]
    out += [Case("fixed 160, 4 prompts", mode, 160, 160, prompts=4) for mode in ("sync", "async")]
    return out


class RunLengths:
    """The lengths that the run draws (overlap.py): they depend on each response's own seed."""

    def __init__(self, case: Case, n: int = 8):
        self.case, self.n = case, n

    def group(self, ticket: int) -> tuple[int, list[int], bool]:
        from rl.generation.engine import request_seed

        if self.case.longest == self.case.median:
            return PROMPT, [self.case.longest] * self.n, True
        seeds = [request_seed(0, ticket, i) for i in range(self.n)]
        return PROMPT, [length_of(seed, self.case.median, self.case.longest) for seed in seeds], True


def simulate(case: Case, times: dict, steps: int):
    """The case in simulated time."""
    import importlib

    from rl import flags
    from rl.plan.choices import Job, Machine, Setting

    script, machine = SCRIPTS[case.mode], Machine(1, 2)
    args = flags.read(importlib.import_module(script).Args, args=[*case.flags, "--max-response-length", str(case.longest)])
    ranks = machine.colocated(1) if case.mode == "sync" else machine.split(1, 1)
    of = times["colocated" if case.mode == "sync" else "split"]
    if case.slow:
        of = dataclasses.replace(of, engine=dataclasses.replace(of.engine, score=SLOW_SECONDS, score_workers=4))
    job = Job(args, machine, lambda _: of, RunLengths(case), lambda _: case.slots)
    return job.run(Setting(script, ranks, 1, case.threshold, case.period), steps).steps


@dataclass
class Args:
    seconds: float = 15.0
    """Seconds of a run's steps, about."""
    calibrate_seconds: float = 20.0
    """Seconds of each measurement of the calibration."""
    service_times: str | None = None
    """A file of service times to use instead of a calibration; one that is made is kept there."""
    only: str = ""
    """Run only the cases whose work or name begins with this."""
    out: str = str(RESULTS)
    """Directory of the results."""


def calibrated(args: Args) -> dict:
    from rl.plan import service_times
    from rl.plan.calibrate import calibrate
    from rl.plan.workload import Drawn

    path = Path(args.service_times) if args.service_times else None
    if path and path.exists():
        return service_times.load(path)
    lengths, times = Drawn(8, 36, 0.9, 240), {}
    for where, script, batch in (
        ("colocated", "train_sync", "--train-batch-size"),
        ("split", "train_async", "--ppo-mini-batch-size"),
    ):
        flags = [batch, "16", *SEQS, "--max-response-length", "240"]
        times[where] = calibrate(script, flags, lengths, ranks=2, seconds=args.calibrate_seconds)
        print(f"calibrated {where}", flush=True)
    if path:
        service_times.save(times, path)
    return times


def picks(rows: list[dict]) -> list[tuple[str, str, str, float]]:
    """Of each work: the predicted best, the measured best, and the measured speed of the one over the other's."""
    out = []
    for work in dict.fromkeys(row["work"] for row in rows):
        of = [row for row in rows if row["work"] == work]
        if len(of) > 1:
            rate = lambda row: row["tokens_per_s"]  # noqa: E731
            predicted, measured = max(of, key=lambda row: row["predicted_tokens_per_s"]), max(of, key=rate)
            out.append((work, predicted["name"], measured["name"], rate(predicted) / rate(measured)))
    return out


def main(args: Args) -> None:
    from rl.data.demo import model_dir

    model_dir()
    times, rows = calibrated(args), []
    chosen = [case for case in cases() if case.work.startswith(args.only) or case.name.startswith(args.only)]
    for number, case in enumerate(chosen, 1):
        steps = int(np.clip(args.seconds / simulate(case, times, 12).step_seconds, 9, 60)) // 3 * 3
        simulated = simulate(case, times, steps)
        real = one_run(case.mode, RunArgs(steps=steps), case.median, case.longest, *case.flags)
        row = {"work": case.work, "name": case.name, "steps": steps}
        row |= {"predicted": simulated.step_seconds, "measured": real["step"]}
        row |= {"predicted_tokens_per_s": simulated.tokens_per_second, "tokens_per_s": real["tokens_per_s"]}
        row |= {"predicted_idle": simulated.learner_idle, "idle": real["idle"]}
        row["error"] = row["predicted"] / row["measured"] - 1
        rows.append(row)
        told = f"{row['predicted']:.3f} s, real {row['measured']:.3f} s"
        print(f"{number} of {len(chosen)}: {case.work}, {case.name}: {told}", flush=True)
    errors = sorted(abs(row["error"]) for row in rows)
    cells = []
    for row in rows:
        seconds = [f"{row['predicted']:.3f}", f"{row['measured']:.3f}", f"{row['error']:+.0%}"]
        cells.append([row["work"], row["name"], *seconds, f"{row['predicted_idle']:.0%}", f"{row['idle']:.0%}"])
    head = ["work", "mode (async: threshold/period)", "s a step, plan", "real", "error", "learner waits, plan", "real"]
    text = [table(head, cells)]
    text.append(f"{len(rows)} cases: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}.")
    text += [
        f"{work}: the plan picks {predicted}, {ratio:.0%} as fast as the fastest measured, {measured}."
        for work, predicted, measured, ratio in picks(rows)
    ]
    text.append(f"Demo model, 2 ranks of one thread, one run a case. {words(setting(commit=commit()))}.")
    data = {"rows": rows, "service times": {where: dataclasses.asdict(of) for where, of in times.items()}}
    write("plan", data, "\n\n".join(text), Path(args.out))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

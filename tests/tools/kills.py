"""Kills a run of split ranks again and again at random moments, resumes it each time, and checks the files it leaves.

    python tests/tools/kills.py --script train_async.py --kills 60
    python tests/tools/kills.py --script train_one_step_off.py --kills 40

A learner, a generator or torchrun itself gets SIGKILL: while ranks start, between steps, and while a checkpoint is written.
What torchrun survives it restarts itself; when it is killed the same command is given again. test_checkpoint.py runs a few.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is also a program

from helpers import ROOT, command, environment, marked

TEST_FREQ = 2


@dataclass
class Args:
    script: str = "train_async.py"
    """Which mode."""
    model: str = "demo"
    """demo, demo-vl or demo-hybrid."""
    kills: int = 10
    """How many times to kill."""
    steps_between: int = 4
    """The run has this many steps a kill."""
    seed: int = 0
    """Of the moments and the victims."""
    timeout: float = 90
    """Seconds without a new step after which the run counts as stuck."""


class Job:
    """torchrun and its ranks, recognised by a mark in their environment or, for forks, in their name."""

    def __init__(self, torchrun: Sequence[str], script: str, flags: list[str], log: Path):
        self.command = [*torchrun, "--max-restarts", "100000", "--monitor-interval", "0.1", script, *flags]
        self.mark, self.log = uuid.uuid4().hex[:8], log
        self.start()

    def start(self) -> None:
        how = {"cwd": ROOT, "env": environment(MARK=self.mark), "start_new_session": True}
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, **how)

    def members(self) -> dict[int, str]:
        """pid -> "learner", "generator", "torchrun" or "other", of all living processes with the mark."""
        forks = {self.mark: "torchrun", f"{self.mark}-0": "learner", f"{self.mark}-1": "generator"}
        return {pid: forks.get(name) or role(line, environ) for pid, name, line, environ in marked(self.mark)}


def role(line: str, environ: str) -> str:
    """Return the role of a process that was started as a user starts it."""
    if "torch.distributed.run" in line:
        return "torchrun"
    names = {"LOCAL_RANK=0": "learner", "LOCAL_RANK=1": "generator"}
    return next((names[word] for word in environ.split("\0") if word in names and "train_" in line), "other")


def steps_of(run: Path) -> int:
    """Return the number of steps logged so far."""
    try:
        return (run / "metrics.jsonl").read_text().count('"training/global_step"')
    except OSError:
        return 0


def saving(run: Path) -> bool:
    return any(run.glob(".step_*"))


def wait_until(condition, job: Job, seconds: float) -> bool:
    """Return whether the condition came true before the time was up or torchrun ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and job.process.poll() is None:
        if condition():
            return True
        time.sleep(1e-3)
    return condition()


def strike(job: Job, run: Path, rng: random.Random, timeout: float) -> str:
    """Kill once. Return whom and when."""
    moment = rng.choices(["starting", "running", "saving"], [1, 5, 4])[0]
    before = steps_of(run)
    if moment == "starting":
        wait_until(lambda: steps_of(run) > before, job, rng.uniform(0, 5))
    else:
        if not wait_until(lambda: steps_of(run) > before, job, timeout):
            raise SystemExit(f"no new step for {timeout} s after step {before}: see {job.log}")
        if moment == "running":
            time.sleep(rng.uniform(0, 0.5))
        else:
            wait_until(lambda: saving(run), job, 5)
            time.sleep(rng.uniform(0, 0.05))
    victim = rng.choice(["learner", "learner", "generator", "generator", "torchrun"])
    pid = next((pid for pid, name in job.members().items() if name == victim), None)
    if pid is None:
        return strike(job, run, rng, timeout)
    was_saving = saving(run)
    os.kill(pid, signal.SIGKILL)
    if victim == "torchrun":
        job.process.wait()
        deadline = time.monotonic() + timeout  # ranks that are still importing end when they are done with it
        while left := job.members():
            if time.monotonic() > deadline:
                raise SystemExit(f"torchrun was killed and left {left}")
            time.sleep(0.05)
        job.start()
    return f"{victim}, {'saving' if was_saving else moment}"


def audit(run: Path, steps: int) -> str:
    """Raises AssertionError unless every step was logged once and every ticket is in one place; says what was found."""
    from rl.checkpoint.files import GROUPS, TRAINING, UNFINISHED
    from rl.checkpoint.resume import groups_of
    from rl.record.validations import rows_of
    from rl.samples.recorder import EVERY, NEWEST
    from tools.recorded import Record

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["step"]] == [*range(1, steps + 1)], "a step is missing or appears twice"
    records = [json.loads(line) for line in (run / "tickets.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [*range(1, steps + 1)]
    assert [row["step"] for row in rows_of(run / "groups.jsonl")] == [*range(1, steps + 1)]
    kept = [step for step in range(1, steps + 1) if step > steps - NEWEST or step % EVERY == 0]
    assert Record(run).steps == kept and all(Record(run).groups(step) for step in kept)
    trained = Counter(ticket for record in records for ticket in record["trained"])
    dropped = Counter(
        t for record in records for name, tickets in record.items() if name not in ("step", "trained") for t in tickets
    )
    assert max((trained + dropped).values()) == 1, "a ticket was trained or dropped twice"
    last = run / f"step_{steps:06d}" / TRAINING
    flying = {group.ticket for name in (GROUPS, UNFINISHED) for group in groups_of((last / name).read_bytes())}
    assert not flying & {*trained, *dropped}
    lost = {*range(max(trained) + 1)} - {*trained, *dropped} - flying
    assert not lost, f"tickets {sorted(lost)} are nowhere"
    return f"{len(trained)} tickets trained once, {len(dropped)} dropped, {len(flying)} in flight, none lost, in {steps} steps"


def audit_validations(run: Path, steps: int) -> None:
    """Raises AssertionError unless every validation was recorded once, in order of step."""
    validated = [json.loads(line)["step"] for line in (run / "validations.jsonl").read_text().splitlines()]
    assert validated == [*range(0, steps, TEST_FREQ), steps], f"a validation is missing or appears twice: {validated}"


def main(args: Args, torchrun: Sequence[str]) -> Path:
    """torchrun: what starts two ranks of a script. Returns the run's directory."""
    rng, steps = random.Random(args.seed), args.steps_between * args.kills + 5
    out = Path(tempfile.mkdtemp(prefix="kills-"))
    run, memory = out / "run", set(os.listdir("/dev/shm"))
    flags = ["--output-dir", str(out), "--experiment-name", "run", "--total-training-steps", str(steps), "--save-freq", "2"]
    flags += ["--test-freq", str(TEST_FREQ), "--val-max-samples", "4", "--seed", "0", "--model", args.model]
    if args.script == "train_async.py":  # much in flight, and responses that see several versions
        flags += ["--staleness-threshold", "2", "--max-num-seqs", "64", "--max-staleness", "2"]
    job = Job(torchrun, args.script, flags, out / "log.txt")
    struck = Counter()
    for number in range(args.kills):
        if job.process.poll() is not None:
            raise SystemExit(f"the run ended by itself, code {job.process.returncode}, after {number} kills: see {job.log}")
        what = strike(job, run, rng, args.timeout)
        struck[what] += 1
        print(f"kill {number + 1}/{args.kills}: {what}, at step {steps_of(run)} of {steps}", flush=True)
    while job.process.poll() is None:
        before = steps_of(run)
        if not wait_until(lambda before=before: steps_of(run) > before, job, args.timeout) and job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            raise SystemExit(f"no new step for {args.timeout} s after step {before}: see {job.log}")
    assert job.process.returncode == 0, f"exit code {job.process.returncode}: see {job.log}"
    deadline = time.monotonic() + 10
    while (left := job.members()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes are left: {left}"
    assert not {name for name in set(os.listdir("/dev/shm")) - memory if "rl-ring" in name}, "shared memory is left"
    assert not [*run.glob(".step_*")], "a half-written checkpoint is left"
    audit_validations(run, steps)
    print(f"{args.kills} kills ({', '.join(f'{n} {what}' for what, n in sorted(struck.items()))}): {audit(run, steps)}")
    return run


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__), command(ranks=2, fresh=True))

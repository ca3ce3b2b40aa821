"""Sends Ctrl-C or SIGTERM to runs of the three scripts at random moments, and checks the files and processes they leave.

    python tests/tools/signals.py --signal SIGINT --trials 60
    python tests/tools/signals.py --signal SIGTERM --trials 40

The job is gone before torchrun loses its patience and kills a rank. After Ctrl-C its line is the console's last, no rank prints
a traceback, and the checkpoint that the line names is whole. After SIGTERM the newest checkpoint is whole and of the last step
that was logged. Nothing is left of any run. Every other run is started in the background of a shell, where SIGINT is ignored
from birth. tests/ranks/test_signals.py runs a few.
"""

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from helpers import ROOT, command, environment, left_over, marked

sys.path.insert(0, str(ROOT))

SCRIPTS = ("train_sync.py", "train_one_step_off.py", "train_async.py")
MOMENTS = ("start", "loading", "running", "saving", "end")
STEPS, LOADING = 9, 8  # of a run; seconds that a learner takes to load its model, where that is the moment


@dataclass
class Args:
    signal: Literal["SIGINT", "SIGTERM"] = "SIGINT"
    """What to send."""
    trials: int = 10
    """How many runs."""
    seed: int = 0
    """Of the scripts and moments."""


@dataclass(frozen=True)
class Trial:
    """One run, ended by a signal."""

    script: str
    moment: str
    number: signal.Signals
    ignored: bool  # whether SIGINT was, from the run's birth
    fresh: bool  # as a user starts it, not as a fork of a process that has its imports
    delay: float  # from 0 to 1: how far into the moment


class Run:
    """torchrun and two ranks of a script."""

    def __init__(self, trial: Trial, out: Path):
        self.trial, self.out, self.log, self.mark = trial, out, out / "console", uuid.uuid4().hex[:8]
        flags = ["--output-dir", str(out), "--experiment-name", "run", "--total-training-steps", str(STEPS)]
        flags += ["--save-freq", "3", "--val-max-samples", "8", "--max-response-length", "32"]
        slow = ["tests/programs/slow_learner.py", str(LOADING)] if trial.moment == "loading" else []
        start = command(*slow, trial.script, *flags, ranks=2, fresh=trial.fresh)
        if trial.ignored:
            start = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *start]
        how = {"cwd": ROOT, "env": environment(MARK=self.mark, PYTHONUNBUFFERED="1"), "start_new_session": True}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(start, stdout=log, stderr=log, **how)

    @property
    def console(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def ranks_run(self) -> bool:
        """Return whether both ranks have reached the script's first lines."""
        ranks = [m for m in marked(self.mark) if m[1].startswith(f"{self.mark}-") or "\0LOCAL_RANK=" in f"\0{m[3]}"]
        return len(ranks) >= 2

    def come_to(self, moment: str, delay: float) -> None:
        """Waits for the moment."""
        run = self.out / "run"
        reached = {
            "start": lambda: self.ranks_run,
            "loading": lambda: "loading" in self.console,
            "running": lambda: (run / "metrics.jsonl").exists(),
            "saving": lambda: any(run.glob(".step_*")),
            "end": lambda: any(run.glob(f"step_{STEPS:06d}*")),
        }
        deadline = time.monotonic() + 120
        while not reached[moment]() and self.process.poll() is None:
            assert time.monotonic() < deadline, f"no {moment} within 120 s:\n{self.console}"
            time.sleep(1e-3)
        longest = {"start": 6.0 if self.trial.fresh else 2.0, "loading": 7.0, "running": 2.0, "saving": 0.1, "end": 0.5}
        time.sleep(0.2 + delay * longest[moment] if moment == "start" else delay * longest[moment])

    def strike(self) -> float:
        """Sends the signal; returns the seconds until nothing of the run is left."""
        at = time.monotonic()
        if self.trial.number == signal.SIGINT and not self.trial.ignored:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.process.pid, signal.SIGINT)  # as a terminal does
        else:
            self.process.send_signal(self.trial.number)
        try:
            self.process.wait(timeout=60)
            while left_over(self.mark):
                assert time.monotonic() < at + 60, f"left: {left_over(self.mark)}"
                time.sleep(0.05)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        return time.monotonic() - at


def attempt(trial: Trial, out: Path) -> tuple[float, str]:
    """Run one trial. Return the seconds until its end, and what was left. Raise AssertionError if a promise is broken."""
    from checkpoints import damage

    memory = set(os.listdir("/dev/shm"))
    run = Run(trial, out)
    run.come_to(trial.moment, trial.delay)
    was_over = run.process.poll() is not None
    assert not was_over or run.process.returncode == 0, run.console
    seconds, console = run.strike(), run.console
    assert not {name for name in set(os.listdir("/dev/shm")) - memory if "rl-ring" in name}, "shared memory is left"
    assert "forcefully exiting via" not in console, f"torchrun has killed a rank after {seconds:.1f} s\n{console}"
    assert console.count("Traceback") <= 1, f"more than torchrun's own traceback\n{console}"
    assert not re.search(r'File ".*/(rl/|train_)', console), f"a rank's traceback\n{console}"
    last = console.rstrip().rpartition("\n")[2]
    ended = "\nreward plot " in console
    if trial.number == signal.SIGINT and not (was_over or ended):
        assert last.startswith("Ctrl-C: stopped; "), f"the last line is not ours\n{console}"
        named = last.partition("newest checkpoint is ")[2]
        assert not named or damage(Path(named)) is None, f"{named} is damaged\n{console}"
        return seconds, last.removeprefix("Ctrl-C: stopped; ").replace(str(out), "")
    if trial.number == signal.SIGTERM:
        return seconds, check_promise(out / "run", console, ended).replace(str(out), "")
    return seconds, "ended before"


def check_promise(run: Path, console: str, ended: bool) -> str:
    """After SIGTERM the newest checkpoint contains every trained step."""
    from checkpoints import damage

    from rl.checkpoint.best import STEPS

    log = run / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []
    if not any(steps):
        return "no step was trained"
    saved = next((path for path in sorted(run.glob(STEPS), reverse=True) if damage(path) is None), None)
    assert saved is not None, f"{steps[-1]} steps were trained, none is saved\n{console}"
    assert saved.name == f"step_{steps[-1]:06d}", (
        f"step {steps[-1]} was trained, {saved.name} is the newest checkpoint\n{console}"
    )
    assert ended or re.search(rf"^SIGTERM to .*: stopped after step {steps[-1]}; it resumes from {saved}$", console, re.M), (
        console
    )
    return "came to its end" if ended else f"stopped, saved {saved.name}"


def draw(rng: random.Random, number: signal.Signals, count: int, fresh: bool) -> list[Trial]:
    """Trials of all scripts and moments in turn, in random order."""
    trials = [Trial(SCRIPTS[i % 3], MOMENTS[i % len(MOMENTS)], number, bool(i % 2), fresh, rng.random()) for i in range(count)]
    rng.shuffle(trials)
    return trials


def main(args: Args) -> None:
    seconds, left = [], []
    for trial in draw(random.Random(args.seed), signal.Signals[args.signal], args.trials, fresh=True):
        with tempfile.TemporaryDirectory(prefix="signals-") as out:
            took, what = attempt(trial, Path(out))
        seconds.append(took)
        left.append(re.sub(r"/run/step_\d+|step_\d+", "a whole one", what))
        background = " in the background" if trial.ignored else ""
        print(f"{len(seconds)}/{args.trials}: {trial.script} {trial.moment}{background}: {took:.1f} s, {what}", flush=True)
    counts = ", ".join(f"{left.count(what)} {what}" for what in sorted(set(left)))
    times = f"median {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s"
    print(f"{args.trials} {args.signal}: gone after {times}; {counts}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))

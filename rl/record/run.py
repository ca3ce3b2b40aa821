"""A run's record: metrics.jsonl and the console always, other loggers (rl/record/loggers.py) if asked for. The console has a
live progress bar on a terminal, a plain line now and then elsewhere.

Metrics bear verl's names; docs/metrics.md explains each. A step's metrics are one strict JSON line, written at once, so that
a crash loses nothing; NaN and infinities are null, which every JSON reader takes.
"""

import fcntl
import itertools
import json
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from rl.errors import UserError
from rl.masking import masked
from rl.parts import Part
from rl.printable import printable
from rl.ranges import MayChange, Range, check_name, check_path
from rl.ranks.timers import Timers
from rl.record import provenance, validations

METRICS, TICKETS, GROUPS = "metrics.jsonl", "tickets.jsonl", "groups.jsonl"
RECORDS = (METRICS, TICKETS, GROUPS, validations.FILE)


@dataclass(frozen=True)
class LogArgs(Part):
    """Logging: metrics, the run's directory, recorded samples."""

    _field = "log"

    project_name: MayChange[str] = "rl"
    """Project in Weights & Biases, MLflow, SwanLab and Trackio."""
    experiment_name: MayChange[str | None] = None
    """Name of the run and of its directory. The same name resumes the run. Default: the script and the time."""
    output_dir: MayChange[str] = "runs"
    """Directory in which each run makes its own directory."""
    logger: MayChange[tuple[Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"], ...]] = ("console",)
    """Additional destinations of the metrics. metrics.jsonl and the console always get them. $WANDB_MODE=offline and
    $SWANLAB_MODE=offline let these work without a network and an account; $MLFLOW_TRACKING_URI says where MLflow writes."""
    log_val_generations: MayChange[Annotated[int, Range(at_least=0)]] = 8
    """Responses of each validation to show in a table of the loggers. All of them are in val_generations/."""
    record_samples: MayChange[Literal["recent", "all", "off"]] = "recent"
    """Trained samples to record in the run's directory, for view.py and replay.py: the newest 20 steps and every tenth, within
    4 GB; all steps; or none, and no responses of validations either."""

    def check(self, args) -> None:
        """Raise UserError for a name that is not plain, or directory."""
        check_name("--project-name", self.project_name)
        if self.experiment_name is not None:
            check_name("--experiment-name", self.experiment_name, nested=True)
        check_path("--output-dir", self.output_dir)


@dataclass(frozen=True)
class Origin:
    """The run and the checkpoint that a run resumes from."""

    run_dir: Path
    checkpoint: Path | None  # None: from the beginning, in the directory of a run that had not saved anything

    @property
    def step(self) -> int:
        """The last step that was saved."""
        return int(self.checkpoint.name.removeprefix("step_")) if self.checkpoint else 0


class Run:
    """One run's record. On ranks other than 0 (`enabled=False`) only the timers work."""

    def __init__(self, args, job, hardware: dict, enabled: bool, origin: Origin | None = None):
        """job: its Job. origin: the run that resumes, in its directory. Raise UserError if that cannot be written."""
        self.timer = Timers()
        self.enabled = enabled
        self.dir = origin.run_dir if origin else Path(args.log.output_dir)
        if not enabled:
            return
        total_steps = job.total_steps
        record = _strict(provenance.describe_run(args, hardware, job.script) | {"total_steps": total_steps} | job.notes)
        first_step = origin.step + 1 if origin and origin.checkpoint else 0
        if not origin:
            default = f"{job.script}-{time.strftime('%Y%m%d-%H%M%S')}"
            self.dir = new_directory(Path(args.log.output_dir), args.log.experiment_name or default)
        name = f"config_from_{first_step:06d}.json" if origin else "config.json"
        self._lock = _lock(self.dir)
        for file in RECORDS if origin else ():
            _forget_from(self.dir / file, first_step)
        (self.dir / name).write_text(json.dumps(record, indent=2, default=str, allow_nan=False))
        self._loggers = []
        if {*args.log.logger} - {"console"}:
            from rl.record import loggers  # late: few runs have one

            self._loggers = loggers.opened(args, self.dir, first_step)
        self._warned: Counter[str] = Counter()  # how often each warning's cause has come up
        self._console = ConsoleLog(total_steps)  # last: the others may print
        if origin:
            self.say(f"resumes after step {origin.step} of {total_steps}: {origin.checkpoint or 'nothing was saved before'}")
        elif self.dir != Path(args.log.output_dir) / (args.log.experiment_name or "") and "replay" not in job.notes:
            name = os.path.relpath(self.dir, args.log.output_dir)
            self.say(f"run {self.dir} (resume with --experiment-name {name})")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the step's metrics and timers, and timing_s/step: the seconds since the last `log`, timed or not."""
        metrics = metrics | {"timing_s/step": self.timer.elapsed}
        metrics |= {f"timing_s/{name}": seconds for name, seconds in self.timer.seconds.items()}
        self.timer.restart()
        if not self.enabled:
            return
        self._append(METRICS, {"step": step, "time": time.time(), **_strict(metrics)})
        self._console.show(step, metrics)
        own = metrics
        if validations.STEP in metrics:  # the loggers have the validation from `log_validation`
            own = {name: value for name, value in metrics.items() if not validations.is_of_validation(name)}
        for logger in self._loggers:
            logger.log(step, own)

    def log_validation(self, metrics: dict[str, float], version: int, at_step: int, chooses_best: bool) -> None:
        """Record a validation in validations.jsonl and, at the step that was validated, with the loggers. metrics: with
        training/validated_step. at_step: the step under way."""
        if not self.enabled:
            return
        step = metrics[validations.STEP]
        about = {"step": step, "version": version, "at_step": at_step, "time": time.time(), "chooses_best": chooses_best}
        self._append(validations.FILE, about | _strict(metrics))
        for logger in self._loggers:
            logger.log_validation(step, {name: value for name, value in metrics.items() if name != validations.STEP})

    def log_tickets(self, step: int, trained: list[int], **others: list[int]) -> None:
        """Record in tickets.jsonl which tickets the step trained, and the others by their fate."""
        self._append(TICKETS, {"step": step, "trained": trained, **others})

    def log_groups(self, step: int, groups: list[dict]) -> None:
        """Record in groups.jsonl what a step trains on, without tokens: prompts, scores, lengths."""
        self._append(GROUPS, {"step": step, "groups": groups})

    def log_generations(self, step: int, rows: list[dict], shown: int) -> None:
        """Write val_generations/step_<step>.jsonl, a line per response, and show the first ones in a table of the loggers."""
        if not (self.enabled and rows):
            return
        validations.write_responses(self.dir, step, rows)
        for logger in self._loggers if shown else ():
            logger.log_generations(step, rows[:shown])

    def say(self, text: str) -> None:
        """Print a line for the user, above the progress bar if there is one."""
        if self.enabled:
            self._console.say(masked(text))

    def warn(self, what: str, count: int, detail: str) -> None:
        """Count `what`, which went wrong `count` more times. Print a line the first time, and at each tenfold total."""
        if not (self.enabled and count):
            return
        before = self._warned[what]
        self._warned[what] += count
        if len(str(self._warned[what])) > len(str(before)) or not before:
            self.say(f"warning: {what}: {self._warned[what]:,} so far. {detail}")

    def warn_unscored(self, errors: list[str]) -> None:
        """Warn of responses that could not be scored, with the last one's error."""
        last = f"The last: {errors[-1]}" if errors else ""
        self.warn("responses that could not be scored", len(errors), last)

    def finish(self, checkpoint: Path | None, plot: str = "reward") -> None:
        """Draw the plot of that name, close everything, and print the files' paths. checkpoint: None if nothing was trained."""
        if not self.enabled:
            return
        self._console.close()
        for logger in self._loggers:
            logger.finish()
        self._lock.close()
        if checkpoint:
            print(f"checkpoint  {checkpoint}", flush=True)
        print(f"metrics     {self.dir / METRICS}", flush=True)
        print(f"{plot} plot {plot_reward(self.dir / METRICS, self.dir / f'{plot}.png')}", flush=True)

    def _append(self, name: str, record: dict) -> None:
        if not self.enabled:
            return
        try:
            with open(self.dir / name, "ab") as file:
                file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise UserError(
                f"{self.dir / name} cannot be written ({error.strerror}). Make room, and run the same command again to resume."
            ) from error


def _lock(directory: Path):
    """Hold the run's directory until this process ends. Raise UserError if another process holds it."""
    try:
        handle = open(directory / ".lock", "w")  # noqa: SIM115  (held as long as the run)
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}): check its permissions and its disk.") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{directory} belongs to a run that is still running. Choose another --experiment-name.") from None
    except OSError:
        pass  # a file system without locks
    return handle


def _forget_from(jsonl: Path, step: int) -> None:
    """Move lines of this step and later ones, and unreadable ones, to *_superseded.jsonl. Drop a line that was cut off."""
    if not jsonl.exists():
        return
    *lines, cut = jsonl.read_bytes().split(b"\n")
    kept, others = [], []
    for line in lines:
        row = validations.row_of(line)
        (kept if row and row["step"] < step else others).append(line + b"\n")
    if not (others or cut):
        return
    with open(jsonl.with_stem(f"{jsonl.stem}_superseded"), "ab") as file:
        file.writelines(others)
    partial = jsonl.with_suffix(".partial")
    partial.write_bytes(b"".join(kept))
    os.replace(partial, jsonl)


def new_directory(parent: Path, name: str) -> Path:
    """Make parent/name, or name-2, name-3, ... if it is taken: two runs never share one. Raise UserError if that fails."""
    for i in itertools.count(1):
        path = parent / (name if i == 1 else f"{name}-{i}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()  # atomic
            return path
        except FileExistsError as error:
            if path.exists():
                continue
            raise UserError(f"--output-dir {parent}: {error.filename} is a file. Choose another.") from error
        except OSError as error:
            raise UserError(f"--output-dir {parent}: {path} cannot be made ({error.strerror}). Choose another.") from error


def _strict(value):
    """Return the value with None for NaN and infinities, which strict JSON cannot hold."""
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot_reward(metrics: Path, target: Path) -> Path:
    """Draw training reward and validation accuracy, or the negative log-likelihood, against steps, as a PNG."""
    from matplotlib.figure import Figure  # not pyplot: that would choose a backend for a notebook that calls this

    rows = validations.rows_of(metrics)
    validated = validations.read(metrics.parent)
    figure = Figure(figsize=(7, 4), dpi=110)
    axes = figure.subplots()
    _plot(axes, rows, "critic/score/mean", label="training reward", lw=1)
    _plot(axes, rows, "actor/nll", label="training nll", lw=1)  # of a supervised run, which has no reward
    _plot(axes, rows, "val/nll", label="validation nll", lw=2)
    for name in sorted({name for row in validated for name in row if name.startswith("val-core/")}):
        _plot(axes, validated, name, label=name.removeprefix("val-core/"), lw=2)
    is_supervised = any("actor/nll" in row for row in rows)
    axes.set(xlabel="step", ylabel="nll, nats a token" if is_supervised else "reward, accuracy", title=metrics.parent.name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.13, top=0.92)  # tight_layout would draw everything twice
    figure.savefig(target)
    return target


def _plot(axes, rows: list[dict], name: str, **style) -> None:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


LINE_EVERY = 2.0  # seconds between lines, and between the numbers of the progress bar
# What a line shows: metric -> its form. Each is the mean of the steps since the last line; shares of time are weighted by it.
SHOWN = {
    "critic/score/mean": "reward {:.3f}",
    "actor/nll": "nll {:.3f}",
    "val/nll": "validation nll {:.3f}",
    "tokens/s": "{:,.0f} tokens/s",
    "fully_async/trainer/idle_ratio": "learners wait {:.0%}",
    "fully_async/rollouter/idle_ratio": "generators wait {:.0%}",
}


class ConsoleLog:
    """A live progress bar on a terminal; elsewhere a plain line now and then, always for a validation and the last step. Its
    numbers are means of the steps since the last line."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self.last_line = -math.inf
        self._steps: list[dict[str, float]] = []  # metrics of the steps since the last line
        self.accuracy: float | None = None
        self.first: tuple[int, float] | None = None  # step and time of the first `show`: a resumed run starts late
        self.bar = None
        console = Console()
        # also isatty: with FORCE_COLOR rich takes a log file for a terminal
        if sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
            whole = {"table_column": Column(no_wrap=True)}  # in a narrow window only the bar gives way
            columns = [TextColumn("step", **whole), MofNCompleteColumn(**whole)]
            columns += [BarColumn(bar_width=None, table_column=Column(ratio=1)), TextColumn("{task.description}", **whole)]
            columns += [TextColumn("left", **whole), TimeRemainingColumn(elapsed_when_finished=False, **whole)]
            self.bar = Progress(*columns, console=console, expand=True)
            self.bar.start()
            console.show_cursor(True)  # a failing rank ends by os._exit, which would leave the terminal without a cursor
            self.task = self.bar.add_task("", total=total_steps)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show the step, now or with later ones."""
        self._steps.append(metrics)
        validation = [v for k, v in metrics.items() if k.startswith("val-core/") and "/acc/mean@" in k]
        if validation:
            self.accuracy = sum(validation) / len(validation)
        now = time.monotonic()
        first_step, started = self.first = self.first or (step, now)
        if self.bar:
            self.bar.update(self.task, completed=step)
        if not (validation or "val/nll" in metrics or step == self.total_steps or now - self.last_line > LINE_EVERY):
            return
        self.last_line = now
        text = self._text(with_accuracy=bool(validation or self.bar))  # once in plain lines
        if self.bar:
            self.bar.update(self.task, description=text)
            if validation:
                self.bar.console.print(f"step {metrics.get(validations.STEP, step)}: validation accuracy {self.accuracy:.3f}")
            return
        done, steps = step - first_step, self.total_steps - first_step
        left = f"  {(now - started) / done * (self.total_steps - step):.0f} s left" if 0 < done < steps else ""
        print(f"step {step}/{self.total_steps}  {text}{left}", flush=True)

    def _text(self, with_accuracy: bool) -> str:
        """Return the numbers of the steps since the last line, which end with it."""
        found = {name: value for name in SHOWN if (value := _mean(name, self._steps)) is not None}
        self._steps = []
        words = [SHOWN[name].format(value) for name, value in found.items()]
        if with_accuracy and self.accuracy is not None:
            words.insert("critic/score/mean" in found, f"validation accuracy {self.accuracy:.3f}")
        return "  ".join(words)

    def say(self, text: str) -> None:
        text = printable(text)
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


def _mean(name: str, steps: list[dict[str, float]]) -> float | None:
    """Return the steps' mean of a metric; None if no step has it. tokens/s is of all ranks, perf/throughput of one."""
    seconds = "perf/time_per_step"
    if name == "tokens/s":
        timed = [row for row in steps if row.get(seconds)]
        return sum(row["perf/total_num_tokens"] for row in timed) / sum(row[seconds] for row in timed) if timed else None
    having = [row for row in steps if row.get(name) is not None and not math.isnan(row[name])]
    weights = [row.get("timing_s/step", 1.0) if name.endswith("idle_ratio") else 1.0 for row in having]
    total = sum(weights)
    return sum(row[name] * weight for row, weight in zip(having, weights, strict=True)) / total if total else None

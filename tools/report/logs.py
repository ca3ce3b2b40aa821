"""Recorded runs (tools/report/readers.py reads the files), and groups of runs of the same kind. Needs no torch.

Damaged records are left out, and `Log.notes` says so. Seconds are seconds of training: start-up before the first step and the
pauses between a run's attempts (a stop, a crash, a restart) are not counted. A step ends at its record's `time` and began
`timing_s/step` seconds before, so a gap between one step's end and the next one's beginning is such a pause. A step that was
trained again after a restart counts once. No pauses are looked for in records of verl, whose steps leave out the publish and
the validation between them.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from rl.errors import UserError
from rl.ranges import DEFAULT_BATCH, of_today
from rl.record import validations
from tools.report import readers

NAMES = {"seed", "experiment_name", "output_dir", "project_name", "logger"}  # flags that distinguish no groups
NAMES |= {"record_samples", "resume_mode"}
PAUSE = 1.0  # seconds between two steps that only a restart exceeds
MIN_STEPS = 20  # that a run needs for a conclusion about its learning or its speed
MIN_SEEDS = 3  # runs that each group needs for a conclusion about a difference in learning
REWARD, THROUGHPUT, STEP_SECONDS = "critic/score/mean", "tokens/s", "perf/time_per_step"
HELD = "fully_async/rollouter/held_ratio"
IDLE = {"generator": "fully_async/rollouter/idle_ratio", "learner": "fully_async/trainer/idle_ratio"}
Row = tuple[str, str, str]  # subject, conclusion, the numbers it rests on
GIVE = "a run's directory (runs/<name>), its metrics.jsonl, a TensorBoard directory or a verl console log"


@dataclass
class Log:
    """One run, as far as it was recorded. Rows contain only finite numbers, in the order of their steps."""

    path: Path
    config: dict
    rows: list[dict[str, float]]
    notes: list[str] = field(default_factory=list)  # what is wrong with the record
    validations: list[dict[str, float]] = field(default_factory=list)  # lines of validations.jsonl; later all validations

    def __post_init__(self):
        self.validations = _all_validations(self.validations, self.rows)
        self.clock: dict[float, float] = {}  # step -> seconds of training up to its end
        self.starts: set[float] = set()  # the first step of each attempt
        self._read_clock()
        for row in self.rows:  # of all ranks together, for runs on equal machines; perf/throughput is per rank, as in verl
            if row.get("perf/time_per_step") and "perf/total_num_tokens" in row:
                row["tokens/s"] = row["perf/total_num_tokens"] / row["perf/time_per_step"]
        self.flags = of_today(self.config.get("flags", {}))
        self.script = self.config.get("script", "")
        if self.off_policy:
            made = f"its samples were made by other weights, those of {self.config['replay'].get('of')}"
            self.notes.append(f"a replay, off-policy: {made}. Rewards and lengths are theirs")

    @property
    def steps(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @cached_property
    def names(self) -> set[str]:
        """All metrics that were recorded."""
        return {name for row in [*self.rows, *self.validations] for name in row}

    @property
    def steady(self) -> list[dict[str, float]]:
        """The rows without each attempt's first one, whose time includes the start-up; all rows if there are no others."""
        return [row for row in self.rows if row["step"] not in self.starts] or self.rows

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return max(self.clock.values(), default=0.0)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all steps over the seconds of training; None if they were not recorded."""
        tokens = sum(row.get("perf/total_num_tokens", 0.0) for row in self.rows)
        return tokens / self.seconds if tokens and self.seconds else None

    @property
    def code(self) -> str | None:
        """An identifier of the run's code: a digest of its files, or the commit if the record has no digest."""
        return self.config.get("code") or self.config.get("commit")

    @property
    def responses_per_step(self) -> int | None:
        """The number of responses that one step trains; None if config.json does not say."""
        f = self.flags
        if not f.get("rollout_n") or "train_batch_size" not in f:
            return None
        return (f["train_batch_size"] or f.get("ppo_mini_batch_size") or DEFAULT_BATCH) * f["rollout_n"]

    @property
    def off_policy(self) -> bool:
        """Whether this is a replay whose weights are not those that made its samples (replay.py)."""
        return bool(self.config.get("replay", {}).get("off_policy"))

    @property
    def state(self) -> str:
        total = self.config.get("total_steps")
        return "" if total is None else "finished" if self.steps >= total else f"stopped at {self.steps} of {total}"

    def points(self, name: str, axis: str = "step") -> np.ndarray:
        """Return [n, 2]: x and value of a metric. A validation is placed at the step of its weights; on the clock, at the time
        when its result arrived."""
        out = []
        per_step = self.responses_per_step
        for row in self.validations if name.startswith("val-") else self.rows:
            x = {"step": row["step"], "responses": row["step"] * per_step if per_step else None}.get(axis)
            if axis == "seconds":
                x = self.clock.get(row.get("at_step", row["step"]))
            if name in row and x is not None:
                out.append((x, row[name]))
        return np.array(out, dtype=float).reshape(-1, 2)

    def over_time(self, name: str) -> float | None:
        """Return the mean of a share of the step's time, weighted by the steps' durations; None if it was not recorded. The
        first step of each attempt is left out if there are others, since its waiting time includes the start-up."""
        known = [(row[name], own_seconds(row) or 1.0) for row in self.steady if name in row]
        total = sum(seconds for _, seconds in known)
        return sum(share * seconds for share, seconds in known) / total if total else None

    @property
    def mean_step(self) -> float | None:
        """The mean seconds of a step, without the first step of each attempt; None if they were not recorded."""
        seconds = [row["timing_s/step"] for row in self.steady if "timing_s/step" in row]
        return sum(seconds) / len(seconds) if seconds else None

    @property
    def _is_verls(self) -> bool:
        """Whether verl recorded the run: this project's runs have a configuration, or ledgers of their ranks' time."""
        return not self.config and not any(name.startswith("ledger/") for name in self.names)

    def _read_clock(self) -> None:
        seconds = 0.0
        before = None
        is_verls = self._is_verls
        pauses: list[float] = []
        for row in self.rows:
            own = own_seconds(row)
            if "time" not in row or (is_verls and own is None):  # verl's validation before the first step
                continue
            passed = row["time"] - before["time"] if before else None
            gap = passed - own if before and own is not None and row["step"] == before["step"] + 1 else 0.0
            is_pause = gap > PAUSE and not is_verls
            pauses += [gap] if is_pause else []
            if before is None or is_pause or is_only_validated(before):
                self.starts.add(row["step"])
            if before is None or is_pause or passed < 0:  # the clock was set back
                passed = own or 0.0
            seconds += passed
            self.clock[row["step"]] = seconds
            before = row
        if pauses:
            self.notes.append(f"{len(pauses) + 1} attempts: the {sum(pauses):,.0f} seconds between them are not counted")


def own_seconds(row: dict[str, float]) -> float | None:
    """Return the seconds that the step itself took; None if they were not recorded."""
    return row.get("timing_s/step", row.get("perf/time_per_step"))


def is_only_validated(row: dict[str, float]) -> bool:
    """Return whether the row is only of a validation before the first step, not of a step."""
    return any(name.startswith("val-") for name in row) and not row.keys() & {"perf/time_per_step", "critic/score/mean"}


@dataclass
class RunGroup:
    label: str
    logs: list[Log]

    def each(self, number: Callable[[Log], float | None]) -> list[float]:
        """Return number(log) of each run that has one."""
        return [value for log in self.logs if (value := number(log)) is not None]

    def shortest(self, metric: str) -> int:
        """Return the smallest number of steps at which one of the runs recorded the metric."""
        return min(len(log.points(metric)) for log in self.logs)


def find_runs(wheres: tuple[str, ...]) -> list[Path]:
    """Return each argument itself if it is a run or a file, else the runs inside it. Raise UserError if a path does not exist,
    or if there is none."""
    found = []
    for where in map(Path, wheres):
        if not where.exists():
            raise UserError(f"{where}: there is no such file. Give {GIVE}.")
        if where.is_file() or readers.is_run(where):
            found.append(where)
            continue
        inside = [d for d in sorted(where.rglob("*")) if d.is_dir() and readers.is_run(d)]
        inside = [d for d in inside if not readers.is_run(d.parent)]
        found += inside + readers.console_logs(where) or [where]
    if not found:
        raise UserError("no run is named. Give directories of runs (runs/<name>), or a directory that holds some (runs/).")
    return list(dict.fromkeys(found))


def load(path: Path) -> Log:
    """Read a run's directory or one file of records; from a directory read metrics.jsonl, or else its TensorBoard event
    files."""
    if (found := readers.read(path)) is None:
        raise UserError(f"{path}: neither metrics.jsonl nor TensorBoard event files are there. Give {GIVE}.")
    raw, notes = found
    merged, again = readers.merge(raw)
    if again:
        notes.append(f"{again} steps were recorded twice, as after a restart: the later record counts")
    missing = Counter(name for row in raw for name, value in row.items() if not readers.is_number(value))
    notes += [
        f"{name} is NaN or infinite at {count} of {len(raw)} steps, which are left out" for name, count in missing.items()
    ]
    rows = [{name: value for name, value in merged[step].items() if readers.is_number(value)} for step in sorted(merged)]
    if not rows:
        notes.append("no step was recorded")
    elif not any("time" in row for row in rows):
        _add_times(rows, notes)
    directory = path if path.is_dir() else path.parent
    config = {} if readers.is_console(path) else readers.read_config(directory, notes)
    validations = readers.read_validations(directory, notes) if path.is_dir() or path.name == "metrics.jsonl" else []
    return Log(path, config, rows, notes, validations)


def _add_times(rows: list[dict[str, float]], notes: list[str]) -> None:
    """Place the steps one right after the other, for a record without time stamps."""
    time = 0.0
    for row in rows:
        time += own_seconds(row) or 0.0
        row["time"] = time
    notes.append("no time stamps: seconds of training are those of the steps, without what was between them")


def group_runs(logs: list[Log]) -> list[RunGroup]:
    """Group runs that differ only in seed and names; runs of different code are in different groups. Each group's label is its
    script and the settings that it does not share with most others of that script."""

    def marks(log: Log) -> dict:
        hardware = log.config.get("hardware", {})
        flags = {f"--{name.replace('_', '-')}": value for name, value in log.flags.items() if name not in NAMES}
        ranks = {"ranks:": hardware.get("world_size"), "device:": hardware.get("device")}  # of one role if the run is split
        return flags | ranks | {"code:": log.code}

    kinds: dict[str, list[Log]] = defaultdict(list)
    for log in logs:
        kinds[json.dumps([log.script, marks(log)], sort_keys=True) if log.flags else str(log.path)].append(log)
    groups = []
    for members in kinds.values():
        first = members[0]
        rivals = [marks(others[0]) for others in kinds.values() if _base(others[0]) == _base(first)]
        differ = [(n, value) for n, value in marks(first).items() if 2 * sum(o.get(n) == value for o in rivals) <= len(rivals)]
        label = " ".join(
            [first.script, *(f"{name} {_short(value) if name == 'code:' else _words(value)}" for name, value in differ)]
        )
        label += ", off-policy" if first.off_policy else ""
        groups.append(RunGroup(label if first.flags else first.path.name, members))
    for label, count in Counter(group.label for group in groups).items():
        for number, group in enumerate([g for g in groups if g.label == label] if count > 1 else [], 1):
            group.label += f" ({number})"
    return groups


def _base(log: Log) -> str:
    """Return the script that a replay replays, or else the run's own script."""
    return log.script.removeprefix("replay of ")


def _words(value: object) -> str:
    """A flag's value as on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _short(code: str | None) -> str:
    """Return the first eight digits of a digest or commit, with the part after a plus sign."""
    digits, plus, state = (code or "unknown").partition("+")
    return digits[:8] + plus + state


def is_accuracy(name: str) -> bool:
    """Return whether this is the main metric of a validation. verl names it reward if the reward function gives no acc."""
    return name.startswith("val-core/") and ("/acc/" in name or "/reward/" in name)


def smoothed(points: np.ndarray, width: int) -> np.ndarray:
    """Return the mean of the last `width` values, from the first full window on. points [n, 2] -> [n - width + 1, 2]."""
    if len(points) < width:
        return points[:0]
    means = np.convolve(points[:, 1], np.ones(width) / width, "valid")
    return np.stack([points[width - 1 :, 0], means], axis=1)


def _all_validations(lines: list[dict], rows: list[dict]) -> list[dict]:
    """Return each validated step once, in order, from the rows of validations.jsonl and of a run's steps, which alone hold the
    validations of verl's runs. If a step was validated again, the last row counts."""
    found = {}
    for row in rows:
        metrics = {name: value for name, value in row.items() if validations.is_of_validation(name)}
        if any(name.startswith("val-") for name in metrics):
            step = metrics.get(validations.STEP, row["step"])
            found[step] = {"step": step, "at_step": row["step"], "time": row.get("time"), validations.STEP: step} | metrics
    found |= {validation["step"]: validation for validation in lines}
    return [found[step] for step in sorted(found)]


# ------------------------------------------------------------------------------------------- numbers of runs, and their format


def spread(values: list[float], form: str = ".3f") -> str:
    """Return a table's text on a group's values: the mean, with the lowest and the highest if they differ."""
    if not values:
        return "-"
    mean, low, high = (f"{value:{form}}" for value in (np.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} - {high})"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def times(ratio: float) -> str:
    """Return a ratio as text, such as 3.3x."""
    return f"{digits(ratio)}x"


def digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def accuracy_names(group: RunGroup) -> list[str]:
    return sorted({name for log in group.logs for name in log.names if is_accuracy(name)})


def accuracy_at(log: Log, which: int) -> float | None:
    """Return the accuracy of the first (0) or last (-1) validation, averaged over its data sources."""
    curves = [log.points(name) for name in accuracy_names(RunGroup("", [log]))]
    return float(np.mean([c[which, 1] for c in curves])) if curves else None


def of(name: str, reduce: Callable[[np.ndarray], float], last: int | None = None) -> Callable[[Log], float | None]:
    """Return a function that reduces a run's values [n] of that metric to a number. last: only so many of them."""
    return lambda log: float(reduce(values)) if len(values := log.points(name)[::-1, 1][:last]) else None


def last(name: str) -> Callable[[Log], float | None]:
    return of(name, np.mean, 1)


def share(name: str) -> Callable[[Log], float | None]:
    return lambda log: log.over_time(name)


def too_few_steps(group: RunGroup, metric: str) -> Row | None:
    """Return the row that says why nothing is concluded from the group's steps of that metric; None if there are enough
    steps."""
    steps = group.shortest(metric)
    sentence = f"too few steps to say anything: {steps}, where {MIN_STEPS} are the least"
    return (group.label, sentence, f"{metric} of {steps} steps") if steps < MIN_STEPS else None

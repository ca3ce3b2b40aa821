"""Readers of raw records of runs: metrics.jsonl, validations.jsonl, TensorBoard event files, and verl's console and file logs.

Each reader returns rows {"step": ..., metric: value} in the order in which they were written; a step may have several rows.
Lines that cannot be read are left out and noted.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rl.record import validations

NAMES = {  # of older versions of verl
    "mfu/actor": "perf/mfu/actor",
    "trainer/idle_ratio": "fully_async/trainer/idle_ratio",
    "rollouter/idle_ratio": "fully_async/rollouter/idle_ratio",
}
LARGEST = 1e100  # of a metric: sums and squares of it are finite
TEST_SCORE = "val/test_score/"  # of versions before 0.3, in front of the data source: its mean score
CONSOLE = (".log", ".txt", ".out")  # suffixes of the files among which a directory's console logs are searched for


COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEP = re.compile(r"(?:^|[\s)\]|])step:(\d+) - (\S.*)")
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)|True|False"
PART = re.compile(rf"(\S(?:.*\S)?):(?:np\.\w+\()?({NUMBER})\)?(?:\s|$)")
TRUTH = {"True": 1, "False": 0}
BOUND = re.compile(r"max_required_samples'?:? (\d+)")
PAUSES = {  # pauses of the generators: verl's message -> name in a row
    re.compile(r"ShouldPause\].*staleness_samples \d+ >= max_required_samples"): "pauses/bound",
    re.compile(r"ShouldPause\].*full queue"): "pauses/queue",
}
MAX_REQUIRED = "fully_async/count/max_required_samples"


def event_files(directory: Path) -> list[Path]:
    """Return a run's TensorBoard files, from its directory or from tensorboard/ there."""
    pattern = "events.out.tfevents*"
    return sorted(directory.glob(pattern)) or sorted(directory.glob(f"tensorboard/{pattern}"))


def is_run(directory: Path) -> bool:
    return (directory / "metrics.jsonl").exists() or bool(event_files(directory))


def console_logs(directory: Path) -> list[Path]:
    """Return the directory's files that contain steps of verl's console logger."""
    files = [file for file in sorted(directory.iterdir()) if file.suffix in CONSOLE and file.is_file()]
    return [file for file in files if holds_steps(file)]


def read(path: Path) -> tuple[list[dict], list[str]] | None:
    """Return (rows, notes) of a run's directory or of one file; None if there is no record."""
    file = path if path.is_file() else path / "metrics.jsonl"
    if "tfevents" in file.name:
        rows, notes = read_events([file])
    elif file.exists():
        rows, notes = read_console(file) if is_console(file) else read_lines(file)
    elif events := event_files(path):
        rows, notes = read_events(events)
    else:
        return None
    return [{_today(name): value for name, value in row.items()} for row in rows], notes


def _today(name: str) -> str:
    """Return a metric's name in today's versions."""
    source = name.removeprefix(TEST_SCORE)
    return NAMES.get(name, name) if source == name else f"val-core/{source}/acc/mean@1"


def is_console(file: Path) -> bool:
    """Return whether a file counts as a console log: its name is neither that of JSON lines nor of a TensorBoard file."""
    return file.is_file() and file.suffix != ".jsonl" and "tfevents" not in file.name


def read_lines(file: Path) -> tuple[list[dict], list[str]]:
    """Return (rows, notes) of a file with a JSON object in each line; verl's file logger puts the metrics under "data"."""
    rows, bad = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            row = {}
        if isinstance(row, dict) and is_number(row.get("step")):
            metrics = row.pop("data", None)
            rows.append(row | metrics if isinstance(metrics, dict) else row)
        elif row is not None:
            bad.append(str(number))
    shown = ", ".join(bad[:5]) + (", ..." if len(bad) > 5 else "")
    return rows, [f"{file.name} line {shown}: cut off or not a record of a step, left out"] if bad else []


def holds_steps(file: Path) -> bool:
    return any(STEP.search(line) for line in _lines(file))


def read_console(file: Path) -> tuple[list[dict], list[str]]:
    """Return (rows, notes) of verl's console output, as saved by `tee`: the lines of its logger, and its rollouter's messages
    about pauses, which are in the row of the next step.

        (TaskRunner pid=1234) step:12 - actor/grad_norm:np.float64(0.13) - perf/throughput:365.2 - ...

    Colors, a progress bar or a rank's name may precede such a line, and a remark of Ray's may follow it. A step has several
    lines if verl logs its validation or its weight sync later."""
    rows: list[dict] = []
    said: dict[str, float] = {}
    ends: set[str | None] = set()  # the last metric of each line
    newest, cut = -1, 0
    for line in _lines(file):
        if found := STEP.search(line):
            step = int(found[1])
            metrics, whole = _metrics(found[2])
            last = next(reversed(metrics), None)
            if line.endswith("\n"):
                ends.add(last)
            elif metrics and ends and last not in ends:  # the file ends within this line, so its last number may lack digits
                metrics.popitem()
                whole = False
            cut += not whole
            rows.append({"step": step, **metrics, **(said if step > newest else {})})
            said = {} if step > newest else said
            newest = max(newest, step)
        elif bound := BOUND.search(line):
            said[MAX_REQUIRED] = int(bound[1])
        for pattern, name in PAUSES.items():
            said |= {name: said.get(name, 0) + 1} if pattern.search(line) else {}
    notes = [f"{cut} lines of steps are cut off or mixed with others: what cannot be read of them is left out"] if cut else []
    if not rows:
        notes.append("no line of verl's console logger (step:1 - critic/score/mean:0.5 - ...) is in it")
    return rows, notes


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines without colors. A progress bar ends its lines with a carriage return, which also ends a line here."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            yield COLORS.sub("", line)


def _metrics(text: str) -> tuple[dict[str, float], bool]:
    """Return the metrics of a step's line, and whether all of it could be read."""
    found = [PART.match(part) for part in text.split(" - ")]
    return {of[1]: float(TRUTH.get(of[2], of[2])) for of in found if of}, all(found)


def read_validations(directory: Path, notes: list[str]) -> list[dict]:
    """Return the lines of validations.jsonl: one for each validation, with the step of its weights and, as at_step, the step
    during which its result arrived."""
    file = directory / validations.FILE
    lines, bad = read_lines(file) if file.exists() else ([], [])
    notes += bad
    return [{name: value for name, value in line.items() if is_number(value)} for line in lines]


def read_events(files: list[Path]) -> tuple[list[dict], list[str]]:
    """Return (rows, notes) of event files. A row's time is that of its first scalar in the newest file that has the step; a
    validation, which is written later, does not count."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows: dict[int, dict] = defaultdict(dict)
    notes = []
    for file in files:
        try:
            events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        except Exception as error:  # of a damaged or unreadable file: OSError, and TensorBoard's own
            notes.append(f"{file.name} cannot be read: {error or type(error).__name__}")
            continue
        times: dict[int, float] = {}
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                rows[event.step] |= {"step": event.step, name: event.value}
                if not name.startswith("val-"):
                    times[event.step] = min(event.wall_time, times.get(event.step, math.inf))
        for step, time in times.items():
            rows[step]["time"] = time
    return list(rows.values()), notes


def read_config(directory: Path, notes: list[str]) -> dict:
    file = (directory.parent if directory.name == "tensorboard" else directory) / "config.json"
    if not file.exists():
        notes.append("no config.json: the run forms a group of its own, and its samples cannot be counted")
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError):
        notes.append("config.json cannot be read: the run forms a group of its own, and its samples cannot be counted")
        return {}


def merge(raw: list[dict]) -> tuple[dict[float, dict], int]:
    """Return ({step: its row}, how many steps were recorded again). Rows of one step are parts of it, as verl writes them,
    unless they disagree: then the step was trained again after a restart, and the later row counts."""
    rows = {}
    again = 0
    for part in raw:
        row = rows.get(part["step"], {})
        if any(row[name] != value for name, value in part.items() if name in row and is_number(value)):
            row = {}
            again = again + 1
        rows[part["step"]] = row | part
    return rows, again


def is_number(value) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST  # NaN is not

"""A reader of a verl run's console output, as saved by `tee`: the lines of its logger, and its rollouter's messages about
pauses.

    (TaskRunner pid=1234) step:12 - actor/grad_norm:np.float64(0.13) - perf/throughput:365.2 - ...

Colors, a progress bar or a rank's name may precede such a line, and a remark of Ray's may follow it. A step has several lines
if verl logs its validation or its weight sync later.
"""

import re
from collections.abc import Iterator
from pathlib import Path

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


def holds_steps(file: Path) -> bool:
    return any(STEP.search(line) for line in _lines(file))


def read(file: Path) -> tuple[list[dict], list[str]]:
    """Return (rows, notes). The rollouter's messages before the first line of a step are in that line's row."""
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

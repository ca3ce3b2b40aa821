"""The record of validations. Needs no torch.

validations.jsonl in the run's directory has a line for each:

    {"step": 4, "version": 1, "at_step": 6, "time": 1700000000.0, "chooses_best": true, "training/validated_step": 4,
     "val-aux/reward/unscored": 0, "val-core/demo/acc/mean@1": 0.25}

step: the validated weights are those after this step; version: of these weights; at_step and time: the step that was under way
when the result arrived, and when that was; chooses_best: false if too few responses could be scored. The rest are the metrics.
The row of `at_step` in metrics.jsonl repeats the newest validation that arrived during that step.

val_generations/step_<step>.jsonl has a line for each response: prompt, response, ground_truth, score. Left out with
--record-samples off.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

FILE = "validations.jsonl"
STEP = "training/validated_step"
RESPONSES = "val_generations"  # directory
COLUMNS = ("prompt", "response", "ground_truth", "score")


def is_of_validation(name: str) -> bool:
    """Return whether this metric is of a validation: it belongs to the step that was validated."""
    return name.startswith("val-") or name == STEP


def score(metrics: dict[str, float | None]) -> float | None:
    """Return the number by which validations are compared: the mean accuracy over the data sources; None without any."""
    values = [value for name, value in metrics.items() if name.startswith("val-core/") and "/acc/mean@" in name]
    values = [value for value in values if value is not None and math.isfinite(value)]
    return sum(values) / len(values) if values else None


def read(run_dir: Path) -> list[dict]:
    """Return the validations of a run, in order of step. If a step was validated again, the last one counts."""
    found = {row["step"]: row for row in rows_of(run_dir / FILE)}
    return [found[step] for step in sorted(found)]


def scores(validations: Iterable[dict]) -> dict[int, float]:
    """Return step -> score of the validations that may choose the best checkpoint."""
    known = {row["step"]: score(row) for row in validations if row.get("chooses_best", True)}
    return {step: value for step, value in known.items() if value is not None}


def rows_of(file: Path) -> list[dict]:
    """Return the rows of a JSONL file, without damaged ones; none if there is no file."""
    lines = file.read_bytes().split(b"\n") if file.is_file() else ()
    return [row for line in lines if (row := row_of(line))]


def row_of(line: bytes) -> dict | None:
    """Return what the line of a JSONL file records of a step; None if it is cut off or damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def write_responses(run_dir: Path, step: int, rows: list[dict]) -> None:
    """Write the responses of a validation. rows: with COLUMNS."""
    directory = run_dir / RESPONSES
    directory.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step} | {name: row[name] for name in COLUMNS}) for row in rows]
    (directory / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")

"""Responses of the last validation, in a table."""

import json
from pathlib import Path

from rl.record.validations import COLUMNS, RESPONSES, rows_of
from tools.report.logs import RunGroup

ROWS = 10  # of a run's responses
CHARACTERS = 600  # of a text; longer texts lose their middle


def responses(group: RunGroup) -> tuple[str, list[list[str]]] | None:
    """Return (heading, table with its header first) of the group's first run that has any; None if no run has."""
    for log in group.logs:
        run = log.path if log.path.is_dir() else log.path.parent
        for file in sorted(run.glob(f"{RESPONSES}/step_*.jsonl"), reverse=True):
            table = read(file)[: ROWS + 1]
            if len(table) > 1:
                heading = (
                    f"Validation responses of {group.label}, {log.path.name}, after step {int(file.stem.removeprefix('step_'))}"
                )
                return heading, [list(map(_shown, row)) for row in table]
    return None


def read(file: Path) -> list[list[str]]:
    """Return the rows of a file of responses, a header first. Damaged lines are left out."""
    rows = [row for row in rows_of(file) if {*COLUMNS} <= row.keys()]
    return [[*COLUMNS], *(["unscored" if row[name] is None else _text(row[name]) for name in COLUMNS] for row in rows)]


def _text(value) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return value if isinstance(value, str) else json.dumps(value)


def _shown(cell: str) -> str:
    half = CHARACTERS // 2
    text = cell if len(cell) <= CHARACTERS else f"{cell[:half]} ... {cell[-half:]}"
    return text.encode(errors="backslashreplace").decode()  # a response may hold half a character

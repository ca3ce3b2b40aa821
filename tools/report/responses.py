"""Responses of the last validation that recorded some (--log-val-generations), in a table."""

import json
import re
from pathlib import Path

from rl.printable import escaped
from rl.record.validations import COLUMNS, RESPONSES, row_of
from tools.report.logs import Log, RunGroup

ROWS = 10  # of a run's responses
CHARACTERS = 600  # of a text; longer texts lose their middle


def responses(group: RunGroup) -> tuple[str, list[list[str]]] | None:
    """Return (heading, table with its header first) of the group's first run that has any; None if no run has."""
    for log in group.logs:
        for file in reversed(sorted(_files(log))):
            table = read(file)[: ROWS + 1]
            if len(table) > 1:
                step = int(file.stem.removeprefix("step_"))
                heading = f"Validation responses of {group.label}, {log.path.name}, after step {step}"
                return heading, [list(map(_shown, row)) for row in table]
    return None


def read(file: Path) -> list[list[str]]:
    """Return the rows of a file of responses, a header first. Damaged lines are left out."""
    rows = [row for line in file.read_bytes().split(b"\n") if (row := row_of(line)) and {*COLUMNS} <= row.keys()]
    return [[*COLUMNS], *(["unscored" if row[name] is None else _text(row[name]) for name in COLUMNS] for row in rows)]


def _text(value) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return value if isinstance(value, str) else json.dumps(value)


def _files(log: Log) -> list[Path]:
    run = log.path if log.path.is_dir() else log.path.parent
    return [file for file in run.glob(f"{RESPONSES}/step_*.jsonl") if file.stem[5:].isdecimal() and file.is_file()]


def _shown(cell: str) -> str:
    half = CHARACTERS // 2
    text = cell if len(cell) <= CHARACTERS else f"{cell[:half]} ... {cell[-half:]}"
    return text.encode(errors="backslashreplace").decode()  # a response may hold half a character


def markdown(cell: str) -> str:
    """Return a cell of a table in Markdown: text on one line, escaped so that neither Markdown nor a terminal changes it."""
    text = re.sub(r"([\\`*_\[\]|~$<>&])", r"\\\1", cell)
    text = re.sub(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", "<br>", text)
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda match: "\\" + escaped(match[0]), text)

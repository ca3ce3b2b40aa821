"""Responses of the last validation that recorded some (--log-val-generations), with the images of their prompts."""

import shutil
from pathlib import Path

from rl.record.validation_tables import DIRECTORY, Picture, read
from tools.report.logs import Log, RunGroup

ROWS = 10  # of a run's responses
CHARACTERS = 600  # of a text; longer texts lose their middle


def responses(group: RunGroup, directory: Path) -> tuple[str, list[list]] | None:
    """Return (heading, table with its header first) of the group's first run that has any; None if no run has. Cells are texts,
    or lists of pictures, whose files are copied into `directory`."""
    for log in group.logs:
        for file in reversed(sorted(_tables(log))):
            table = read(file)[: ROWS + 1]
            if len(table) > 1:
                step = int(file.stem.removeprefix("step_"))
                heading = f"Validation responses of {group.label}, {log.path.name}, after step {step}"
                return heading, [[_shown(cell, file.parent, directory) for cell in row] for row in table]
    return None


def _tables(log: Log) -> list[Path]:
    run = log.path if log.path.is_dir() else log.path.parent
    return [file for file in run.glob(f"{DIRECTORY}/step_*.md") if file.stem[5:].isdecimal() and file.is_file()]


def _shown(cell: str | list[Picture], source: Path, directory: Path) -> str | list[Picture]:
    if isinstance(cell, str):
        half = CHARACTERS // 2
        return cell if len(cell) <= CHARACTERS else f"{cell[:half]} ... {cell[-half:]}"
    kept = [picture for picture in cell if (source / picture.file).is_file()]
    for picture in kept:
        shutil.copyfile(source / picture.file, directory / picture.file)
    return kept

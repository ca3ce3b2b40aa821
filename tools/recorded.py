"""The record of a run's samples, for reading (rl/samples/recorder.py writes it)."""

import json
from pathlib import Path

import pyarrow as pa

from rl.errors import UserError
from rl.ranges import of_today
from rl.samples.group import Group, split_records
from rl.samples.recorder import CODEC, DIRECTORY, step_of, steps_of


class Record:
    """The record of a run, for reading."""

    def __init__(self, run_dir: Path):
        """Raise UserError if there is no record."""
        self.directory = run_dir / DIRECTORY
        starts = [json.loads(file.read_text()) for file in steps_of(self.directory, "start")]
        self.starts = [start | {"flags": of_today(start["flags"])} for start in starts]
        if not self.starts:
            raise UserError(f"{run_dir} is no run that recorded its samples: {self.directory} has none.")

    @property
    def steps(self) -> list[int]:
        """The recorded steps, ascending."""
        return [step_of(file) for file in steps_of(self.directory)]

    def start_of(self, step: int) -> dict:
        """Return the record of the run's start in which this step was trained."""
        return [start for start in self.starts if start["after"] < step][-1]

    def groups(self, step: int) -> list[Group]:
        """Return the groups that a step trained. Raise UserError if its file is damaged."""
        return self._groups(self.directory / f"step_{step:06d}.rec")

    def left_out(self, step: int) -> list[Group]:
        """Return the groups that were left out since the step before. Raise UserError if their file is damaged."""
        file = self.directory / f"left_out_{step:06d}.rec"
        return self._groups(file) if file.exists() else []

    def _groups(self, file: Path) -> list[Group]:
        try:
            with pa.input_stream(file, compression=CODEC) as data:
                return [Group.from_bytes(record) for record in split_records(data.read())]
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}). Replay the steps after it with --from-step.") from error

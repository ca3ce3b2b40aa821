"""The record of a run's samples: the groups that the learners trained, so that view.py shows them and replay.py learns from
them again, and those that were left out, for view.py.

    DIR/start_000000.json    a start of the run, after this step: its flags, contents, code
    DIR/step_000001.rec      a step's groups in the form in which they are sent (Group.to_bytes), compressed
    DIR/left_out_000001.rec  groups that arrived by then and are not trained, in the same form; missing if there are none
    DIR/code/<digest>/       the script, losses.py and the script's neighbours as they were, which a replay imports

DIR is <run>/samples. A file has its name once it is complete. Left out: the weights, which are in the run's checkpoints, and
the learner's state, which follows from the samples. tools/recorded.py reads it.
"""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from rl.errors import UserError
from rl.record.provenance import digest_of, package_files, script_files
from rl.samples.group import Group, join_records

DIRECTORY, CODE = "samples", "code"
CODEC = "zstd"
# What --record-samples recent keeps
NEWEST, EVERY = 20, 10
MOST_BYTES = 4 << 30
KINDS = ("step", "left_out")  # of a step's files


class Recorder:
    """Writes a record. A full disk does not stop training: the step is left out, and a warning says so."""

    def __init__(self, run_dir: Path, after: int, keeps_all: bool):
        """after: the step after which a run resumes, else 0. The record of later steps is removed, because they are trained
        again. keeps_all: else only the newest steps and some older ones. Raise UserError if none can be written."""
        self.directory = run_dir / DIRECTORY
        self.keeps_all = keeps_all
        self._missing = False  # whether the last step could not be written
        self._sizes: dict[tuple[int, str], int] = {}  # (step, kind) -> bytes of the file
        try:
            self.directory.mkdir(exist_ok=True)
            for kind in ("start", *KINDS):
                for file in steps_of(self.directory, kind):
                    if step_of(file) > after:
                        file.unlink()
                    elif kind in KINDS:
                        self._sizes[step_of(file), kind] = file.stat().st_size
        except OSError as error:
            why = f"{error.filename or self.directory} cannot be written ({error.strerror})"
            raise UserError(f"{why}. Leave samples out with --record-samples off, or make room.") from error

    def begin(self, start: dict) -> None:
        """Record a start of the run, and copy its code. start: a JSON object, with "after", the step after which the run
        resumes."""
        script = Path(sys.argv[0])
        files = script_files(script)
        code = self.directory / CODE / digest_of(files)
        code.mkdir(parents=True, exist_ok=True)
        of_code = {"file": str(Path(CODE, code.name, script.name)), "rl": digest_of(package_files())}
        for file in files:
            shutil.copyfile(file, code / file.name)
        self._write(self.directory / f"start_{start['after']:06d}.json", json.dumps(start | of_code).encode())

    def write(self, step: int, groups: Sequence[Group], left_out: Sequence[Group] = ()) -> None:
        """Record the groups of a step, and those left out since the step before."""
        try:
            for kind, its in zip(KINDS, (groups, left_out), strict=True):
                if its:
                    data = pa.compress(join_records(group.to_bytes() for group in its), CODEC, asbytes=True)
                    self._write(self._file(step, kind), data)
                    self._sizes[step, kind] = len(data)
            if not self.keeps_all:
                self._remove_older(step)
        except OSError as error:
            if not self._missing:
                print(
                    f"warning: {self.directory}: step {step} is not recorded ({error.strerror or error}). Training continues; "
                    "later steps are recorded if they can be.",
                    file=sys.stderr,
                )
            self._missing = True
        else:
            self._missing = False

    def _remove_older(self, newest: int) -> None:
        """Remove what --record-samples recent does not keep: the oldest steps go first."""
        kept = sorted(its for its in self._sizes if its[0] > newest - NEWEST or its[0] % EVERY == 0)
        while kept and kept[0][0] < newest and sum(self._sizes[its] for its in kept) > MOST_BYTES:
            kept.pop(0)
        for its in self._sizes.keys() - kept:
            del self._sizes[its]
            self._file(*its).unlink(missing_ok=True)

    def _file(self, step: int, kind: str) -> Path:
        return self.directory / f"{kind}_{step:06d}.rec"

    def _write(self, file: Path, data: bytes) -> None:
        unfinished = file.with_suffix(".partial")
        unfinished.write_bytes(data)
        os.replace(unfinished, file)


def steps_of(directory: Path, kind: str = "step") -> list[Path]:
    return [file for file in sorted(directory.glob(f"{kind}_*")) if file.suffix != ".partial"]


def step_of(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])

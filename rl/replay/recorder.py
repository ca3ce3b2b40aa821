"""The record of a run's samples: every group that the learners consumed, in order, so that replay.py can learn from them again.

    DIR/samples.rec        frames, appended step by step: what each start of the run was, and each step's groups
    DIR/code/<digest>/     the script, losses.py and the script's neighbours as they were, which a replay imports

A frame is a header and compressed data, both with a checksum. A step counts if its frames are complete, so the file may be cut
anywhere. A group is recorded in the form in which it is sent (Group.to_bytes): tokens, log-probs, versions, scores. Left out:
the weights, which are in the run's checkpoints, and the learner's state, which follows from the samples.
"""

import json
import os
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from xxhash import xxh3_64_intdigest

from rl.errors import UserError
from rl.record.provenance import digest_of, package_files, script_files
from rl.samples.group import Group

SAMPLES, CODE = "samples.rec", "code"
HEADER = struct.Struct("<4sQQQQ")  # kind, step, bytes of the data, bytes of them unpacked, checksum of the data
CHECK = struct.Struct("<Q")  # checksum of the header, after it
START, PART, LAST = b"RLs0", b"RLs1", b"RLs2"  # kinds: a start of the run; a group of a step, and the last of them
CODEC = pa.Codec("zstd", compression_level=1)


class Recorder:
    """A writer that appends to a record. A full disk does not stop training: the step is left out, and a warning says so."""

    def __init__(self, directory: str, run_dir: Path | None, after: int):
        """run_dir: of a run that resumes; after: the step after which it resumes. The record of later steps is removed,
        because they are trained again. Raise UserError if the directory has another run's record, or if none can be written."""
        self.directory = Path(directory)
        self.path = Path(directory) / SAMPLES
        self._missing = False  # whether the last step could not be written
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            frames = list(scan(self._file))
            if frames and (run_dir is None or frames[0].start["run"] != str(run_dir.resolve())):
                raise UserError(
                    f"--record-samples {directory} holds the samples of {frames[0].start['run']}. Give another directory."
                )
            self._end = max((frame.end for frame in frames if frame.step <= after), default=0)
            os.ftruncate(self._file, self._end)
        except OSError as error:
            raise UserError(
                f"--record-samples {directory}: {error.filename or self.path} cannot be written ({error.strerror})."
            ) from error

    def begin(self, run_dir: Path, start: dict) -> None:
        """Record a start of the run, and copy its code. start: a JSON object, with "after", the step after which the run
        resumes."""
        script = Path(sys.argv[0])
        files = script_files(script)
        code = self.directory / CODE / digest_of(files)
        code.mkdir(parents=True, exist_ok=True)
        start = start | {
            "run": str(run_dir.resolve()),
            "file": str(Path(CODE, code.name, script.name)),
            "rl": digest_of(package_files()),
        }
        for file in files:
            shutil.copyfile(file, code / file.name)
        self._append(start["after"], [(START, json.dumps(start).encode())])

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Record the groups of a step."""
        kinds = [PART] * (len(groups) - 1) + [LAST]
        self._append(step, ((kind, group.to_bytes()) for kind, group in zip(kinds, groups, strict=True)))

    def _append(self, step: int, frames: Iterable[tuple[bytes, bytes]]) -> None:
        """Append the step's frames, or none of them. frames: (kind, data)."""
        end = self._end
        try:
            for kind, data in frames:
                end = _write(self._file, end, _frame(kind, step, data))
        except OSError as error:
            os.ftruncate(self._file, self._end)
            if not self._missing:
                print(
                    f"warning: {self.path}: step {step} is not recorded ({error.strerror}). Training continues; later steps "
                    "are recorded if they can be.",
                    file=sys.stderr,
                )
            self._missing = True
        else:
            self._end = end
            self._missing = False


class Record:
    """A record's complete part, for reading."""

    def __init__(self, directory: Path):
        """Check every frame. Raise UserError if there is no record."""
        self.directory = directory
        try:
            self._file = os.open(directory / SAMPLES, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(
                f"{directory / SAMPLES} cannot be read ({error.strerror}): no samples were recorded here."
            ) from error
        self.starts: list[dict] = []
        self._frames: dict[int, list[Frame]] = {}  # of complete steps, by step
        parts = []
        self.end = 0
        for frame in scan(self._file, check_data=True):
            self.end = frame.end
            if frame.kind == START:
                self.starts.append(frame.start)
                continue
            parts = [*parts, frame] if parts and parts[0].step == frame.step else [frame]
            if frame.kind == LAST:
                self._frames[frame.step], parts = parts, []
        self.lost = os.fstat(self._file).st_size - self.end  # bytes after the last complete frame
        if not self.starts:
            raise UserError(f"{directory / SAMPLES} is no record, or cut off before its first step.")

    @property
    def steps(self) -> list[int]:
        """The steps whose samples are complete, ascending."""
        return sorted(self._frames)

    def start_of(self, step: int) -> dict:
        """Return the record of the run's start in which this step was trained."""
        return [start for start in self.starts if start["after"] < step][-1]

    def groups(self, step: int) -> list[Group]:
        return [Group.from_bytes(frame.data) for frame in self._frames[step]]


# ------------------------------------------------------------------------------------------------------------ frames


@dataclass(frozen=True)
class Frame:
    """A frame's place in the file."""

    file: int
    kind: bytes
    step: int
    at: int  # of the data
    size: int  # of the compressed data
    unpacked: int
    checksum: int

    @property
    def end(self) -> int:
        return self.at + self.size

    @property
    def compressed(self) -> bytes:
        return os.pread(self.file, self.size, self.at)

    @property
    def data(self) -> bytes:
        return CODEC.decompress(self.compressed, self.unpacked, asbytes=True)

    @property
    def start(self) -> dict:
        return json.loads(self.data)


def scan(file: int, check_data: bool = False) -> Iterator[Frame]:
    """Yield the frames from the file's beginning up to the first incomplete one. check_data: also read and check the data of
    each frame."""
    at = 0
    size = os.fstat(file).st_size
    while len(header := os.pread(file, HEADER.size + CHECK.size, at)) == HEADER.size + CHECK.size:
        if CHECK.unpack_from(header, HEADER.size)[0] != xxh3_64_intdigest(header[: HEADER.size]):
            return
        kind, step, *of_data = HEADER.unpack_from(header)
        frame = Frame(file, kind, step, at + len(header), *of_data)
        if frame.end > size or (check_data and xxh3_64_intdigest(frame.compressed) != frame.checksum):
            return
        yield frame
        at = frame.end


def _frame(kind: bytes, step: int, data: bytes) -> bytes:
    compressed = CODEC.compress(data, asbytes=True)
    header = HEADER.pack(kind, step, len(compressed), len(data), xxh3_64_intdigest(compressed))
    return header + CHECK.pack(xxh3_64_intdigest(header)) + compressed


def _write(file: int, at: int, data: bytes) -> int:
    """Write all of the data at this position. Return where it ends."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        left = left[written:]
        at = at + written
    return at

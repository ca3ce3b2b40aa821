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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from rl.errors import UserError
from rl.record.provenance import digest_of, package_files, script_files
from rl.samples.group import Group

SAMPLES, CODE = "samples.rec", "code"
HEADER = struct.Struct("<4sQQQQ")  # kind, step, bytes of the data, bytes of them unpacked, checksum of the data
CHECK = struct.Struct("<Q")  # checksum of the header, after it
START, PART, LAST = b"RLr0", b"RLr1", b"RLr2"  # kinds: a start of the run; groups of a step, and the last of them
FRAME_BYTES = 8 << 20  # of groups in a frame, approximately
CODEC = pa.Codec("zstd", compression_level=1)


class Recorder:
    """A writer that appends to a record. A full disk does not stop training: the step is left out, and a warning says so."""

    def __init__(self, directory: str, run_dir: Path | None, after: int):
        """run_dir: of a run that resumes; after: the step after which it resumes. The record of later steps is moved to
        samples_superseded.rec. Raise UserError if the directory has another run's record, or if none can be written."""
        self.directory, self.path = Path(directory), Path(directory) / SAMPLES
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
            self._set_rest_aside()
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
        self._append(step, _parts(groups))

    def _append(self, step: int, frames) -> None:
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
            self._end, self._missing = end, False

    def _set_rest_aside(self) -> None:
        size = os.fstat(self._file).st_size
        if size > self._end:
            with open(self.path.with_stem(f"{self.path.stem}_superseded"), "ab") as aside:
                for at in range(self._end, size, FRAME_BYTES):
                    aside.write(os.pread(self._file, min(FRAME_BYTES, size - at), at))
            os.ftruncate(self._file, self._end)


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
        parts, self.end = [], 0
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
        return [Group.from_bytes(record) for frame in self._frames[step] for record in _unpack(frame.data)]


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
    at, size = 0, os.fstat(file).st_size
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
        left, at = left[written:], at + written
    return at


def _parts(groups: Sequence[Group]) -> Iterator[tuple[bytes, bytes]]:
    """Yield (kind, data) of a step's frames."""
    records, size = [], 0
    for number, group in enumerate(groups, 1):
        records.append(group.to_bytes())
        size += len(records[-1])
        if number == len(groups) or size >= FRAME_BYTES:
            yield (LAST if number == len(groups) else PART), _pack(records)
            records, size = [], 0


def _pack(records: list[bytes]) -> bytes:
    """Return the records in the order that compresses best: all heads (the length of the JSON text, and the text), then all
    arrays as planes: the first byte of every four, then the second byte of every four, and so on. The upper bytes of most
    tokens are equal."""
    heads = [4 + struct.unpack_from("<I", record)[0] for record in records]
    cut = [(record[:head], record[head:]) for record, head in zip(records, heads, strict=True)]
    arrays = b"".join(rest.ljust(_whole(len(rest)), b"\0") for _, rest in cut)
    planes = np.frombuffer(arrays, np.uint8).reshape(-1, 4).T.tobytes()
    sizes = struct.pack(f"<I{2 * len(records)}Q", len(records), *heads, *map(len, records))
    return b"".join([sizes, *(head for head, _ in cut), planes])


def _unpack(data: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<I", data)
    heads, sizes = np.frombuffer(data, np.uint64, 2 * count, 4).astype(int).reshape(2, count).tolist()
    at, out = 4 + 16 * count, []
    planes = np.frombuffer(data, np.uint8, offset=at + sum(heads)).reshape(4, -1)
    arrays, begin = planes.T.tobytes(), 0
    for head, size in zip(heads, sizes, strict=True):
        out.append(data[at : at + head] + arrays[begin : begin + size - head])
        at, begin = at + head, begin + _whole(size - head)
    return out


def _whole(size: int) -> int:
    """Return the size, rounded up to a multiple of four bytes."""
    return -(-size // 4) * 4

"""A model's weights in its safetensors files: the tensors of each file, and any span of a tensor's elements.

Files are read, not mapped: their bytes stay in the system's cache, and a process holds one piece of PIECE_BYTES.
"""

import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from rl.errors import UserError
from rl.hub.tensor_writer import PIECE_BYTES, TYPES
from rl.ranks import watchdog

# of each file of weights
SAMPLES = 64
SAMPLE_BYTES = 1 << 16
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {word: dtype for dtype, word in TYPES.items()}
REMEDY = "Copy or download the files again."


class FileSpan(NamedTuple):
    """Consecutive elements in a file."""

    file: str
    dtype: str  # in the words of safetensors
    begin: int  # byte in the file
    elements: int


class Stored(NamedTuple):
    """A tensor in a file."""

    span: FileSpan
    shape: torch.Size


def sample(files: Iterable[Path]) -> str:
    """A digest of the files' names, sizes, and SAMPLES pieces of each."""
    state = xxhash.xxh3_64()
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.name} {size} ".encode())
        with open(file, "rb") as handle:
            for i in range(SAMPLES):
                handle.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                state.update(handle.read(SAMPLE_BYTES))
    return state.hexdigest()


def find(path: str, name: str, download: bool = False) -> Path | None:
    """The file of the model at `path`, a directory or a hub name; None if it is not on this machine. download: get it first."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, local_files_only=not download, **quiet)
    return Path(found) if found else None


def stored_tensors(path: str, name: str = "--model") -> dict[str, Stored] | None:
    """The tensors in the model's files by name; None if there are no safetensors files. Raises UserError, which names the file,
    if one is missing or damaged, or does not fit the others. name: of the flag, for a message."""
    where = f"{name} {path}"
    if not (index := find(path, INDEX, download=True)):
        return _stored_in(single, where) if (single := find(path, SINGLE, download=True)) else None
    listed = read_index(index)
    out = {}
    for name in sorted(set(listed.values())):
        if not (file := find(path, name, download=True)):
            raise UserError(f"{where}: the weights cannot be read: {name}, which {INDEX} lists, is not there. {REMEDY}")
        held = _stored_in(file, where)
        if twice := out.keys() & held.keys():
            other = out[min(twice)].span.file
            raise UserError(f"{where}: {min(twice)} is in {other} and in {name}: one of them is of another model. {REMEDY}")
        out |= held
    if lacking := listed.keys() - out.keys():
        name = min(lacking)
        raise UserError(f"{where}: {listed[name]} does not hold {name}, which {INDEX} says it does. {REMEDY}")
    return out


def read_index(file: Path) -> dict[str, str]:
    """Each tensor's name -> the file that an index lists for it. Raises UserError if the index is damaged."""
    try:
        return {name: str(of) for name, of in json.loads(file.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: cannot be read ({error}). {REMEDY}") from None


def _stored_in(file: Path, where: str) -> dict[str, Stored]:
    try:
        with safe_open(file, "pt"):  # checks that the header and the file's length fit together
            pass
        return read_header(file)[0]
    except (SafetensorError, OSError, ValueError) as error:
        size = f", {file.stat().st_size:,} bytes long" if file.exists() else ""
        raise UserError(f"{where}: {file.name}{size}, cannot be read ({error}). {REMEDY}") from None


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors in a safetensors file by name, and the metadata of its header."""
    with open(file, "rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        header = json.loads(handle.read(length))
    words = header.pop("__metadata__", {})
    out = {}
    for name, of in header.items():
        shape = torch.Size(of["shape"])
        out[name] = Stored(FileSpan(file.name, of["dtype"], 8 + length + of["data_offsets"][0], shape.numel()), shape)
    return out, words


class Reader:
    """Reads spans of elements from open files."""

    def __init__(self, files: dict[str, Path]):
        """files: by the names that spans have for them."""
        self._open = {name: open(file, "rb", buffering=0) for name, file in files.items()}  # noqa: SIM115
        self._piece = bytearray(PIECE_BYTES)

    def close(self) -> None:
        for file in self._open.values():
            file.close()

    def read(self, spans: Sequence[FileSpan], out: torch.Tensor, first: int = 0) -> None:
        """Fills `out` [n], of any precision and device, with the elements of the spans, end to end, from number `first` on.
        Raises UserError if a file has become shorter."""
        position = 0  # of the span's first element among all
        for span in spans:
            start = max(first, position)
            stop = min(first + len(out), position + span.elements)
            if start < stop:
                self._read(span, start - position, out[start - first : stop - first])
            position += span.elements

    def _read(self, span: FileSpan, skip: int, out: torch.Tensor) -> None:
        dtype = DTYPES[span.dtype]
        file = self._open[span.file]
        place = span.begin + skip * dtype.itemsize
        for part in out.split(PIECE_BYTES // dtype.itemsize):
            left = memoryview(self._piece)[: len(part) * dtype.itemsize]
            while left:
                if not (got := os.preadv(file.fileno(), [left], place)):
                    raise UserError(f"{file.name}: cannot be read: it has become shorter. {REMEDY}")
                place = place + got
                left = left[got:]
            part.copy_(torch.frombuffer(self._piece, dtype=dtype, count=len(part)))
            watchdog.progress()

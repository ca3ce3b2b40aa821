"""A model's weights in its safetensors files: the tensors of each file, and any span of a tensor's elements."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from rl.errors import UserError
from rl.ranks import watchdog

# of each file of weights
SAMPLES = 64
SAMPLE_BYTES = 1 << 16
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
REMEDY = "Copy or download the files again."


class FileSpan(NamedTuple):
    """The elements of a tensor in a file."""

    file: str
    name: str
    dtype: str  # in the words of safetensors
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
    out = {}
    try:
        with safe_open(file, "pt") as handle:  # checks that the header and the file's length fit together
            for name in handle.keys():  # noqa: SIM118
                tensor = handle.get_slice(name)
                shape = torch.Size(tensor.get_shape())
                out[name] = Stored(FileSpan(file.name, name, tensor.get_dtype(), shape.numel()), shape)
    except (SafetensorError, OSError, ValueError) as error:
        size = f", {file.stat().st_size:,} bytes long" if file.exists() else ""
        raise UserError(f"{where}: {file.name}{size}, cannot be read ({error}). {REMEDY}") from None
    return out


class Reader:
    """Reads spans of elements from open files, which are mapped: their bytes stay in the system's cache."""

    def __init__(self, files: dict[str, Path]):
        """files: by the names that spans have for them."""
        self._open = {name: safe_open(file, "pt") for name, file in files.items()}

    def close(self) -> None:
        self._open.clear()

    def read(self, spans: Sequence[FileSpan], out: torch.Tensor, first: int = 0) -> None:
        """Fill `out` [n], of any precision and device, with the elements of the spans, end to end, from number `first` on."""
        position = 0  # of the span's first element among all
        for span in spans:
            start = max(first, position)
            stop = min(first + len(out), position + span.elements)
            if start < stop:
                self._read(span, start - position, out[start - first : stop - first])
            position += span.elements

    def _read(self, span: FileSpan, skip: int, out: torch.Tensor) -> None:
        tensor = self._open[span.file].get_slice(span.name)
        rows, *_ = tensor.get_shape() or [1]
        width = span.elements // rows
        part = tensor[skip // width : -(-(skip + len(out)) // width)] if tensor.get_shape() else tensor[...]
        out.copy_(part.reshape(-1)[skip % width :][: len(out)])
        watchdog.progress()

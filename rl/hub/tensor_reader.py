"""A model's weights in its safetensors files, which are mapped: their bytes stay in the system's cache."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from rl.errors import UserError

# of each file of weights
SAMPLES = 64
SAMPLE_BYTES = 1 << 16
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
REMEDY = "Copy or download the files again."


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    data: Any  # safetensors' slice: data[...] reads all of it, data[2:5] three rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.data.get_shape())


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
    if one is missing or damaged. name: of the flag, for a message."""
    where = f"{name} {path}"
    if file := find(path, SINGLE, download=True):
        return _stored_in(file, where)
    if not (index := find(path, INDEX, download=True)):
        return None
    out = {}
    for name in sorted(_listed(index)):
        if not (file := find(path, name, download=True)):
            raise UserError(f"{where}: the weights cannot be read: {name}, which {INDEX} lists, is not there. {REMEDY}")
        out |= _stored_in(file, where)
    return out


def _listed(index: Path) -> set[str]:
    try:
        return {*json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read ({error}). {REMEDY}") from None


def _stored_in(file: Path, where: str) -> dict[str, Stored]:
    try:
        handle = safe_open(file, "pt")  # checks that the header and the file's length fit together
        return {name: Stored(file, handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        size = f", {file.stat().st_size:,} bytes long" if file.exists() else ""
        raise UserError(f"{where}: {file.name}{size}, cannot be read ({error}). {REMEDY}") from None

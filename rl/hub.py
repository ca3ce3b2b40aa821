"""A model's weights in the hub's safetensors files: which tensors they hold, by the names there and in memory.

Files are mapped: their bytes stay in the system's cache. transformers fuses all experts of a layer into two tensors; files on
the hub, and the tools that read them, have a tensor for each of an expert's projections, gate, up and down.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
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


def find(path: str, name: str) -> Path | None:
    """The file of the model at `path`, a directory or a hub name, downloaded if need be; None if there is none."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, **quiet)
    return Path(found) if found else None


def stored_tensors(path: str, name: str = "--model") -> dict[str, Stored] | None:
    """The tensors in the model's files by name; None if there are no safetensors files. Raises UserError, which names the file,
    if one is missing or damaged. name: of the flag, for a message."""
    where = f"{name} {path}"
    if file := find(path, SINGLE):
        return _stored_in(file, where)
    if not (index := find(path, INDEX)):
        return None
    out = {}
    for name in sorted(_listed(index)):
        if not (file := find(path, name)):
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


# ------------------------------------------------------------------------------------------------------------- names


def on_hub(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that the hub's files have instead of the model's parameter `name`, by name."""
    model._weight_conversions = None  # of the files that it was read from; without them transformers takes the hub's
    parts = revert_weight_conversion(model, {name: tensor})
    return parts if len(parts) > 1 else {name: tensor}


@dataclass(frozen=True)
class Source:
    """The tensors in the files that make up one of the model's."""

    names: list[str]
    convert: WeightConverter | None = None  # makes it of them; None if it is the only one
    patterns: tuple[str, ...] = ()  # the converter's, by name

    def whole(self, model: PreTrainedModel, target: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The model's tensor `target`, made of the tensors in the files as transformers converts them. Raises ValueError or
        RuntimeError if they do not make such a tensor."""
        if not self.convert:
            return tensors[0]
        convert = deepcopy(self.convert)
        for name, pattern, tensor in zip(self.names, self.patterns, tensors, strict=True):
            convert.add_tensor(target, name, pattern, tensor)
        made = convert.convert(target, model=model, config=model.config)
        if set(made) != {target}:
            raise ValueError(f"{', '.join(made)} are made together")
        tensor = made[target]
        return tensor[0] if isinstance(tensor, list) else tensor


def sources(model: PreTrainedModel, shapes: dict[str, torch.Size]) -> dict[str, Source]:
    """Each name in the model's state dict that the files hold -> its source. Raises ValueError for tensors that have another
    shape or form. shapes: of the tensors in the files."""
    transforms = get_model_conversion_mapping(model)
    renamings = [of for of in transforms if isinstance(of, WeightRenaming)]
    converters = [of for of in transforms if isinstance(of, WeightConverter)]
    by_pattern = {pattern: of for of in converters for pattern in of.source_patterns}
    wanted = model.state_dict()
    found = defaultdict(list)
    for name in sorted(shapes, key=dot_natural_key):  # transformers stacks experts in this order
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target = name
            pattern = None
        if target in wanted:
            found[target].append((name, pattern))
    out = {}
    for target, given in found.items():
        names, patterns = zip(*given, strict=True)
        convert = None if None in patterns else by_pattern[patterns[0]]
        if not convert and len(names) > 1:
            raise ValueError(f"{' and '.join(names)} are both {target}")
        source = out[target] = Source(list(names), convert, patterns)
        try:
            made = source.whole(model, target, [torch.empty(shapes[name], device="meta") for name in names])
        except RuntimeError as error:
            raise ValueError(f"{target} cannot be made of {names[0]} and others ({error})") from None
        if made.shape != wanted[target].shape:
            name = target if convert else names[0]
            raise ValueError(f"{name} is {list(made.shape)} in the files, {list(wanted[target].shape)} by config.json")
    return out

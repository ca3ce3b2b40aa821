"""The names of a model's weights on the hub, where they differ from those of transformers in memory.

transformers fuses all experts of a layer into two tensors; files on the hub, and the tools that read them, have a tensor for
each of an expert's projections, gate, up and down.
"""

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


def on_hub(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that the hub's files have instead of the model's parameter `name`, by name."""
    model._weight_conversions = None  # of the files that it was read from; without them transformers takes the hub's
    parts = revert_weight_conversion(model, {name: tensor})
    return parts if len(parts) > 1 else {name: tensor}


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Source:
    """The tensors in the files that make up one of the model's."""

    names: list[str]
    convert: WeightConverter | None = None  # makes it of them; None if it is the only one
    patterns: tuple[str, ...] = ()  # the converter's, by name

    def whole(self, model: PreTrainedModel, target: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The model's tensor `target`, made of the tensors in the files as transformers converts them. Raises ValueError or
        RuntimeError if they do not make such a tensor."""
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
        if None in patterns:
            if len(names) > 1:
                raise ValueError(f"{' and '.join(names)} are both {target}")
            _check_shape(names[0], shapes[names[0]], wanted[target].shape)
            out[target] = Source(list(names))
            continue
        source = Source(list(names), by_pattern[patterns[0]], patterns)
        try:
            made = source.whole(model, target, [torch.empty(shapes[name], device="meta") for name in names])
        except RuntimeError as error:
            raise ValueError(f"{target} cannot be made of {names[0]} and others ({error})") from None
        _check_shape(target, made.shape, wanted[target].shape)
        out[target] = source
    return out


def _check_shape(name: str, stored: torch.Size, wanted: torch.Size) -> None:
    if stored != wanted:
        raise ValueError(f"{name} is {list(stored)} in the files, {list(wanted)} by config.json")

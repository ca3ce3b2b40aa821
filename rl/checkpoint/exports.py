"""The tensors that a checkpoint holds for other programs: whole ones, in Hugging Face's formats and under its names.

An export is a set of the very tensors that the learners keep: "model" has the model's weights, "adapter" those of its adapters
(rl/adapters), as peft has them. Left out: the directory's other files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards

from rl.adapters import files
from rl.hub.names import Parts, hub_names
from rl.hub.tensor_reader import DTYPES, FileSpan, Reader, find, stored_tensors
from rl.hub.tensor_writer import Copied, piece_sizes, write_model
from rl.learning.learner import Learner
from rl.model.attention import dtype_of, linear_layers
from rl.model.loading import MTP


@dataclass(frozen=True)
class Export:
    """One set of tensors."""

    of: str  # the set
    directory: str  # in the checkpoint
    plan: StateDictSplit
    parts: dict[str, Parts]  # on the first learner: the names of each tensor in the files
    dtypes: dict[str, torch.dtype]  # of each tensor
    copied: Sequence[Copied] = ()  # on the first learner: further tensors of the model's files

    @property
    def names(self) -> list[str]:
        """In the order in which `write` takes them."""
        return [name for of_file in self.plan.filename_to_tensors.values() for name in of_file]

    def write(self, work: Path, stream: Iterator[torch.Tensor]) -> dict[str, tuple[int, str]]:
        """Writes the tensors that the stream yields a piece at a time. Returns (size, checksum) of each file."""
        (work / self.directory).mkdir(exist_ok=True)
        written = write_model(work / self.directory, self.plan, self.parts, self.dtypes, stream, self.copied)
        return {str(Path(self.directory) / name): of for name, of in written.items()}


def exports_of(learner: Learner) -> list[Export]:
    """The exports of a learner's checkpoints: its model, merged with any adapters, and the adapters by themselves."""
    config = learner.config
    model = learner.policy.model
    dtype = config.dtype or config.get_text_config().dtype or torch.float32
    parts = hub_names(model) if learner.ranks.is_main else {}
    dtypes = {name: dtype_of(name, dtype) for name in learner.parameters}
    whole = {name: torch.empty(p.shape, dtype=dtypes[name], device="meta") for name, p in learner.parameters.items()}
    plan = split_torch_state_dict_into_shards(whole)  # files of 5 GB
    copied = _further_tokens(learner.path) if linear_layers(config) and learner.ranks.is_main else ()
    out = [Export("model", "", plan, parts, dtypes, copied)]
    if learner.adapters:
        shapes = {name: model.get_parameter(name).shape for name in learner.adapters.tensors}
        whole = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        one_file = {"filename_pattern": files.PATTERN, "max_shard_size": "1TB"}  # as peft reads it
        plan = split_torch_state_dict_into_shards(whole, **one_file)
        named = {name: [(files.stored_name(name), shape)] for name, shape in shapes.items()}
        out.append(Export("adapter", files.DIRECTORY, plan, named, dict.fromkeys(shapes, torch.float32)))
    return out


def _further_tokens(path: str) -> list[Copied]:
    """The weights that predict further tokens, from the model's files. These stay open, so that no save finds them missing."""
    stored = {name: of for name, of in (stored_tensors(path) or {}).items() if name.startswith(MTP)}
    reader = Reader({name: find(path, name) for name in {of.span.file for of in stored.values()}})

    def pieces(span: FileSpan) -> Iterator[torch.Tensor]:
        first = 0
        for size in piece_sizes(span.elements, DTYPES[span.dtype]):
            reader.read([span], piece := torch.empty(size, dtype=DTYPES[span.dtype]), first)
            first += size
            yield piece

    return [Copied(name, DTYPES[of.span.dtype], of.shape, partial(pieces, of.span)) for name, of in stored.items()]

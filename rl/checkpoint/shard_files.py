"""The learners' parts of a checkpoint: one file each, on a file system that all share or on each node's own disk.

Files are safetensors that torch.distributed.checkpoint can read, too: the header has the place of each shard in its tensor.
A learner reads the rows of its own shards. If its machine lacks a file, another rank sends the content: nodes may have changed
places, and the number of learners may have changed.
"""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed
import xxhash

from rl.hub.tensor_reader import DTYPES, FileSpan, Reader, read_header
from rl.model.shards import Block, local
from rl.ranks import dist, watchdog

SHARDING = "DCP_SHARDING_INFO"  # in a header: JSON, name -> {"saved_offsets": [...]}
Files = dict[str, Sequence]  # name in the checkpoint -> size, checksum and, if it is on a node's own disk, the node


def header(blocks: dict[str, Block]) -> dict[str, str]:
    """The metadata in the header of a learner's file: the places of its tensors."""
    places = {name: {"saved_offsets": block.offset} for name, block in blocks.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", SHARDING: json.dumps(places)}


# --------------------------------------------------------------------------------------------------------- checking


def wrong(path: Path, name: str, of: Sequence, read: bool = True) -> str | None:
    """A line about a file of a checkpoint that is not as it was written; None if it is. read: also compare its content."""
    (size, digest, *node), file = of, path / name
    if not file.is_file() or file.stat().st_size != size:
        return f"{name} is missing or not {size:,} bytes long" + (f": {node[0]} wrote it, on its own disk" if node else "")
    if read and digest_of_file(file) != digest:
        return f"{name} does not fit its checksum"
    return None


def wrong_anywhere(path: Path, files: Files) -> str | None:
    """As `wrong`, of the first wrong file; each is read by one rank whose machine has it. A collective."""
    names = list(files)
    me = torch.distributed.get_rank()
    missing = {number: error for number, name in enumerate(names) if (error := wrong(path, name, files[name], read=False))}
    seen = [set(range(len(names))) - set(of_rank) for of_rank in dist.all_gather_values([*missing])]
    errors = {}
    for number, name in enumerate(names):
        having = [rank for rank, numbers in enumerate(seen) if number in numbers]
        if not having:
            errors[number] = missing[number]
        elif having[number % len(having)] == me and (error := wrong(path, name, files[name])):
            errors[number] = error
        watchdog.progress()
    reports = dist.all_gather_values([*errors.items()])
    return min((tuple(error) for of_rank in reports for error in of_rank), default=(0, None))[1]


def digest_of_file(file: Path) -> str:
    state = xxhash.xxh3_128()
    with open(file, "rb") as handle:
        while chunk := handle.read(1 << 22):
            state.update(chunk)
            watchdog.progress()
    return state.hexdigest()


# ------------------------------------------------------------------------------------------------------------ reading


class ShardFiles:
    """The learners' files of a checkpoint, to be read by all learners together."""

    def __init__(self, directory: Path, names: Sequence[str]):
        """names: of all files, on any machine. A collective."""
        own = {name: _places(directory, name) for name in names if (directory / name).is_file()}
        reports = dist.all_gather_values(sorted(own))
        self._readers = {name: min(rank for rank, seen in enumerate(reports) if name in seen) for name in names}
        me = torch.distributed.get_rank()
        mine = {name: places for name, places in own.items() if self._readers[name] == me}
        self._places: dict[str, dict[str, tuple[FileSpan, Block]]] = {}  # by file and tensor
        for of_rank in dist.all_gather_values(mine):
            for name, places in of_rank.items():
                self._places[name] = {
                    tensor: (FileSpan(*span), Block(tuple(offset), tuple(shape)))
                    for tensor, (span, offset, shape) in places.items()
                }
        self._own = {name: directory / name for name in own}

    def shapes(self) -> dict[str, list[int]]:
        """The shapes of the whole tensors, by name."""
        out: dict[str, list[int]] = {}
        for places in self._places.values():
            for name, (_, block) in places.items():
                out[name] = list(map(max, out.get(name, block.end), block.end))
        return out

    @torch.no_grad()
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fills this rank's parts of the tensors. Raises UserError if a file has become shorter. A collective."""
        wanted = {name: Block.of(tensor) for name, tensor in tensors.items()}
        lacking = [name for name in self._places if name not in self._own and self._needs(name, wanted)]
        sent = {name for of_rank in dist.all_gather_values(lacking) for name in of_rank}
        with closing(Reader(self._own)) as reader:
            for file in sorted(self._places):
                for name, (span, block) in self._places[file].items():
                    shard = self._broadcast(file, span, block, reader) if file in sent else None
                    if not (common := block.common(wanted[name])):
                        continue
                    part = _read_rows(reader, span, block, common) if shard is None else shard[common.slices(block)]
                    local(tensors[name])[common.slices(wanted[name])].copy_(part)

    def _needs(self, file: str, wanted: dict[str, Block]) -> bool:
        return any(block.common(wanted[name]) for name, (_, block) in self._places[file].items())

    def _broadcast(self, file: str, span: FileSpan, block: Block, reader: Reader) -> torch.Tensor:
        """The shard, on every rank."""
        shard = torch.empty(block.shape, dtype=DTYPES[span.dtype])
        source = self._readers[file]
        if source == torch.distributed.get_rank():
            reader.read([span], shard.view(-1))
        torch.distributed.broadcast(shard, src=source)
        watchdog.progress()
        return shard


def _read_rows(reader: Reader, span: FileSpan, block: Block, common: Block) -> torch.Tensor:
    """Reads `common`, a part of the shard `block`: its rows, then the columns."""
    rows = torch.empty((*common.shape[:1], *block.shape[1:]), dtype=DTYPES[span.dtype])
    first = (common.offset[0] - block.offset[0]) * math.prod(block.shape[1:]) if block.shape else 0
    reader.read([span], rows.view(-1), first)
    return rows[(..., *common.slices(block)[1:])]


def _places(directory: Path, file: str) -> dict[str, tuple[FileSpan, list[int], list[int]]]:
    """For each tensor in a learner's file: where it is in the file, and the offset and shape of this part in the whole."""
    stored, words = read_header(directory / file)
    places = json.loads(words[SHARDING])
    return {name: (of.span._replace(file=file), places[name]["saved_offsets"], [*of.shape]) for name, of in stored.items()}

"""Writes tensors to safetensors files a piece at a time, so that nothing is held in memory a second time.

A safetensors file is the length of its header, the header (JSON: names, types, shapes, positions), and the tensors' bytes. The
shapes determine the header, so the bytes can follow as they arrive. safetensors' own writer builds each file in memory.
"""

import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from huggingface_hub import StateDictSplit

from rl.hub.names import Parts

PIECE_BYTES = 16 << 20
TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


class TensorFile:
    """A safetensors file that is being written: `write` takes the bytes of the announced tensors, in their order."""

    def __init__(self, path: Path, tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str]):
        """tensors: (name, dtype, shape) of each. metadata: of the header."""
        header = {"__metadata__": metadata}
        end = 0
        for name, dtype, shape in tensors:
            start = end
            end = end + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
        self.left = end  # bytes that are still to come
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (closed by `close`)
        self._append(struct.pack("<Q", len(text)) + text)

    def write(self, piece: torch.Tensor) -> None:
        """Appends the piece's elements: on the CPU, contiguous, and already of the announced dtype."""
        data = memoryview(piece.view(-1).view(torch.uint8).numpy())
        self.left -= len(data)
        self._append(data)

    def close(self) -> tuple[int, str]:
        """Brings the file to disk. Returns its size in bytes and its checksum."""
        with self._file:
            if self.left:
                raise ValueError(f"{self._file.name}: {self.left} bytes of the tensors are missing")
            os.fsync(self._file.fileno())
        return self._size, self._digest.hexdigest()

    def _append(self, data: bytes | memoryview) -> None:
        self._digest.update(data)
        self._size += len(data)
        data = memoryview(data)
        while data:
            data = data[self._file.write(data) :]


def piece_sizes(elements: int, dtype: torch.dtype) -> list[int]:
    """The sizes of the pieces into which this many elements are cut."""
    largest = PIECE_BYTES // dtype.itemsize
    return [min(largest, elements - start) for start in range(0, elements, largest)]


def pieces(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The tensor's elements in order, in pieces [n] of at most PIECE_BYTES, on the CPU and in that dtype."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # a slice of one element counts as contiguous, but its bytes cannot be viewed
        flat = flat.clone(memory_format=torch.contiguous_format)
    if len(flat):
        for part in flat.split(piece_sizes(len(flat), dtype)):
            yield part.to("cpu", dtype)


@dataclass(frozen=True)
class Copied:
    """A tensor that the files hold and the model does not."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    pieces: Callable[[], Iterator[torch.Tensor]]  # its elements in order, [n] at a time


def write_model(
    directory: Path,
    plan: StateDictSplit,
    parts: dict[str, Parts],
    dtypes: dict[str, torch.dtype],
    stream: Iterator[torch.Tensor],
    copied: Sequence[Copied] = (),
) -> dict[str, tuple[int, str]]:
    """Writes a Hugging Face model's weights, which `stream` yields in the plan's order, a piece [n] at a time. parts: the names
    and shapes that each tensor has in the files. dtypes: of each tensor. copied: further tensors at the end of the last file.
    Returns (size, checksum) of each file."""
    written = {}
    *_, last = plan.filename_to_tensors
    for name, tensors in plan.filename_to_tensors.items():
        entries = [(part, dtypes[tensor], shape) for tensor in tensors for part, shape in parts[tensor]]
        behind = copied if name == last else ()
        file = TensorFile(directory / name, entries + [(of.name, of.dtype, of.shape) for of in behind], {"format": "pt"})
        rest = sum(of.dtype.itemsize * of.shape.numel() for of in behind)
        while file.left > rest:
            file.write(next(stream))
        for piece in itertools.chain.from_iterable(of.pieces() for of in behind):
            file.write(piece)
        written[name] = file.close()
    if plan.is_sharded:
        files = {part: file for tensor, file in plan.tensor_to_filename.items() for part, _ in parts[tensor]}
        files |= {of.name: last for of in copied}
        index = {"metadata": plan.metadata, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return written

"""Images: their tokens, positions and pixels, the same for generator and learner. For Qwen2.5-VL, Qwen3-VL, Qwen3.5.

An image becomes image tokens in the prompt's ids, one for each square of merged patches. Their embeddings come from the vision
tower and are put in by place, so that an image token that a model samples by itself is an ordinary token. Positions are
three-dimensional (time, row, column; Qwen2-VL, arXiv 2409.12191): text counts up in all three, the tokens of an image that
begins at c have positions (c, c + row, c + column), and text continues behind the longer side.

`ImagePrep` turns rows into `Images`, one for each prompt. Pixels are made when they are needed, and kept in a bounded memory.
Left out: videos; decoding (rl/images.py); the forward pass (rl/model/vision_forward.py).
"""

import functools
import itertools
import json
import shutil
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from transformers import PretrainedConfig

from rl import images
from rl.errors import ImageError, UserError
from rl.hub import find
from rl.images import PLACE

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json")
KEPT_BYTES = 1 << 30  # of prepared pixels, in each process


@dataclass(frozen=True, eq=False)
class Images:
    """The images of p tokens, m of them image tokens: of a prompt, or of a conversation up to an environment's last answer."""

    digests: tuple[str, ...]  # hex, for each image: of its file's bytes and the preparation's settings
    grid: Tensor  # [images, 3] long: frames (1), rows and columns of patches
    places: Tensor  # [m] long: the places of image tokens, in order
    positions: Tensor  # [3, p] long
    next_position: int  # of the first token behind
    prep: "ImagePrep" = field(repr=False)
    sources: tuple[bytes, ...] = field(repr=False)  # the images' files

    @functools.cached_property
    def digest(self) -> str:
        """The digest of all images: hex, 128 bits."""
        return xxhash.xxh3_128_hexdigest(" ".join(self.digests).encode())

    @functools.cached_property
    def token_counts(self) -> list[int]:
        return (self.grid.prod(1) // self.prep.merge**2).tolist()

    def fault(self) -> ImageError | None:
        """Makes the pixels now, to be kept until they are used. Returns what is wrong with an image."""
        try:
            for image in range(len(self.sources)):
                self.pixels_of(image)
        except ImageError as error:
            return error
        return None

    def pixels_of(self, image: int) -> Tensor:
        """[patches, values of a patch] fp32 on the CPU, of one image; prepared now unless still kept. Raises ImageError."""
        try:
            pixels = self.prep.pixels(self.digests[image], self.sources[image])
            if len(pixels) != int(self.grid[image].prod()):
                raise ImageError("is of another size than its header says")
            return pixels
        except ImageError as error:
            raise ImageError(f"image {image} {error}") from None


class ImagePrep:
    """The preparation of images for one model. PIL does it on every machine: torchvision's resizing gives other pixels."""

    def __init__(self, path: str, config: PretrainedConfig):
        """Raise UserError if the preparation of the model at `path` cannot be read."""
        # From its module, since transformers 5.5 exports it only with torchvision. Imported late: it takes a second.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        self.path = path
        try:
            self.processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        except Exception as error:  # OSError, ValueError, ImportError: nearly anything, as with tokenizers
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"--model {path}: the preparation of images cannot be read there ({reason}). Copy the model's "
                "preprocessor_config.json next to the weights."
            ) from None
        self.image_token = config.image_token_id
        self.merge = config.vision_config.spatial_merge_size
        size = self.processor.size
        self.cut = images.Cut(self.processor.patch_size, self.merge, size["shortest_edge"], size["longest_edge"])
        _check_sizes(self.processor, config, path)
        settings = json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        self._seed = xxhash.xxh3_64_intdigest(settings.encode())
        self._kept: OrderedDict[str, Tensor] = OrderedDict()  # pixels by digest, the most recently used last
        self._lock = threading.Lock()  # of what is kept
        self._preparing = threading.Lock()  # held while an image is prepared: the others can be had meanwhile

    def save(self, directory: Path) -> None:
        """Copies the model's files about images to the directory."""
        for name in FILES:
            if found := find(self.path, name):
                shutil.copyfile(found, directory / name)

    def expand(self, ids: Sequence[int], sources: Sequence[bytes]) -> tuple[list[int], Images]:
        """Token ids with one image token for each image -> ids with all, and the images. Raises ImageError."""
        if (places := list(ids).count(self.image_token)) != len(sources):
            raise ImageError(f"the prompt has {places} places for images ({PLACE}), the row has {len(sources)} images")
        counts = iter([self.cut.count(*size) for size in images.sizes(sources)])
        whole = [same for token in ids for same in ([token] * next(counts) if token == self.image_token else [token])]
        return whole, self.over(whole, [place for place, token in enumerate(whole) if token == self.image_token], sources)

    def over(self, ids: Sequence[int], places: Sequence[int], sources: Sequence[bytes]) -> Images:
        """The images of token ids that have all image tokens, at these places. Raises ImageError."""
        grids = [self.cut.grid(width, height) for width, height in images.sizes(sources)]
        merged = [(rows // self.merge, columns // self.merge) for _, rows, columns in grids]
        begins = itertools.accumulate((rows * columns for rows, columns in merged), initial=0)
        found, following = positions(len(ids), [places[begin] for begin, _ in zip(begins, merged, strict=False)], merged)
        return Images(
            digests=tuple(xxhash.xxh3_128_hexdigest(source, seed=self._seed) for source in sources),
            grid=torch.tensor(grids, dtype=torch.long).view(-1, 3),
            places=torch.tensor(places, dtype=torch.long),
            positions=found,
            next_position=following,
            prep=self,
            sources=tuple(sources),
        )

    def once(self, ids: Sequence[int]) -> list[int]:
        """Token ids with one image token for each image, to be read."""
        return [token for i, token in enumerate(ids) if token != self.image_token or ids[i - 1 : i] != [token]]

    def prepare(self, sources: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        """Image files -> (pixels [patches, values of a patch] fp32, grid [images, 3]). Raises ImageError."""
        out = self.processor(
            [images.to_rgb(source) for source in sources], return_tensors="pt", input_data_format="channels_last"
        )
        return out["pixel_values"], out["image_grid_thw"]

    def pixels(self, digest: str, source: bytes) -> Tensor:
        """One image's pixels [patches, values of a patch], made now unless they are kept. Raises ImageError."""
        if (found := self._known(digest)) is not None:
            return found
        with self._preparing:
            found = self._known(digest)  # another thread may have made it meanwhile
            return self._keep(digest, self.prepare([source])[0]) if found is None else found

    def _known(self, digest: str) -> Tensor | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def _keep(self, digest: str, pixels: Tensor) -> Tensor:
        with self._lock:
            self._kept[digest] = pixels
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)  # the least recently used
        return pixels


def image_sizes(config: PretrainedConfig, prompt_ids: Sequence[int]) -> list[int]:
    """Patches of each image of a prompt, by its ids. Two images always have text between them."""
    runs = (len(list(run)) for token, run in groupby(prompt_ids) if token == config.image_token_id)
    return [tokens * config.vision_config.spatial_merge_size**2 for tokens in runs]


def tower_flops(config: PretrainedConfig, patches: Sequence[int], frozen: bool) -> float:
    """FLOP of the vision tower's forward and backward (only forward if it is frozen) over images of this many patches, as in
    rl/learning/flops.py: 6 per matrix parameter and patch, for attention 12 * hidden * the patches that a patch sees (in
    Qwen2.5-VL often a window)."""
    v = config.vision_config
    merged = v.hidden_size * v.spatial_merge_size**2
    windows = getattr(v, "window_size", None)
    out = getattr(v, "out_hidden_size", v.hidden_size)
    gates = 3 if windows else 2  # Qwen2.5-VL's are gated
    matrices = v.in_channels * v.temporal_patch_size * v.patch_size**2 * v.hidden_size
    matrices += v.depth * (4 * v.hidden_size**2 + gates * v.hidden_size * v.intermediate_size)
    mergers = 1 + len(getattr(v, "deepstack_visual_indexes", ()))
    matrices += mergers * (merged**2 + merged * out) / v.spatial_merge_size**2
    seen = 0.0
    for length in patches:
        full = len(v.fullatt_block_indexes) if windows else v.depth
        window = min(length, (windows // v.patch_size) ** 2) if windows else length
        seen += length * (full * length + (v.depth - full) * window)
    total = 6 * matrices * sum(patches) + 12 * v.hidden_size * seen
    return total / 3 if frozen else total


def positions(length: int, starts: Sequence[int], sizes: Sequence[tuple[int, int]]) -> tuple[Tensor, int]:
    """(positions [3, length], the next one) of a prompt whose images begin at `starts`, of `sizes` (rows, columns)."""
    parts = []
    done = 0  # tokens so far
    now = 0  # the next position
    for start, (rows, columns) in zip(starts, sizes, strict=True):
        parts.append((now + torch.arange(start - done)).expand(3, -1))
        now += start - done
        row = torch.arange(rows).repeat_interleave(columns)
        column = torch.arange(columns).repeat(rows)
        parts.append(now + torch.stack([torch.zeros_like(row), row, column]))
        now, done = now + max(rows, columns), start + rows * columns
    parts.append((now + torch.arange(length - done)).expand(3, -1))
    return torch.cat(parts, dim=1), now + length - done


def _check_sizes(processor, config: PretrainedConfig, path: str) -> None:
    """Raises UserError for the preparation of another model."""
    vision = config.vision_config
    theirs = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
    ours = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
    if theirs != ours:
        raise UserError(
            f"--model {path}: preprocessor_config.json cuts images into patches of {theirs} (size, frames, merged), "
            f"config.json wants {ours}. Take both from the same model."
        )

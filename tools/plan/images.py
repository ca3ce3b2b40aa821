"""Prompts with images for a planned run: images of a stated size, or the data's own, whose headers are read.

Token counts, grids and positions are real, from rl/data/image_prompts.py. Pixels have shapes and no values, and no image is
decoded.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PretrainedConfig

from rl import images
from rl.data.args import demo_files
from rl.data.chat_template import with_defaults
from rl.data.image_prompts import ImagePrep, Images
from rl.data.job import order_of
from rl.data.prompts import PromptDataset
from rl.errors import ImageError, UserError
from rl.model.pretrained import load_tokenizer
from rl.model.vision_forward import row_inputs
from rl.setup import CommonArgs
from tools.plan.fake_device import FakeDevice

DATA = "data"
Prompt = tuple[np.ndarray, Images | None]  # ids [p] int32


def prompts_with_images(
    args: CommonArgs, path: str, config: PretrainedConfig, size: str | None, tokens: int, fake: FakeDevice
) -> Callable[[int], Prompt]:
    """Return ticket -> prompt, for a model that takes images. size: as in --image-size; tokens: of a prompt, unless the data's
    are used; fake: the device, where pixels are fake as well. Raise UserError for a wrong size."""
    prep = ImagePrep(path, config)
    prep.prepare = lambda sources: _pixels(prep, config, sources, fake)
    if size == DATA:
        files = demo_files(args.model, args.data.train_files)
        own = load_tokenizer(path, args.trust_remote_code)
        tokenizer = with_defaults(own, args.chat_template_args, args.system_prompt)
        rows = PromptDataset(files, "train", tokenizer, args.data, prep)
        order = order_of(rows, args.seed, args.data.shuffle)
        prompt_of = lambda ticket: rows[order(ticket)[1]]  # noqa: E731
        return lambda ticket: (np.array(prompt_of(ticket).ids, np.int32), prompt_of(ticket).images)
    return _of_size(prep, *_parsed(size), tokens)


def _parsed(size: str | None) -> tuple[int, int, int]:
    """Return (width, height, number) from the words of --image-size. Raise UserError for others."""
    if found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", size or ""):
        return tuple(int(word or 1) for word in found.groups())
    given = f"--image-size {size}: not a size" if size else "the model takes images"
    raise UserError(
        f"{given}. Give the size of the images in each prompt: --image-size 1000x800, or 1000x800x2 for two, or "
        f"--image-size {DATA} for those of --train-files."
    )


def _of_size(prep: ImagePrep, width: int, height: int, number: int, tokens: int) -> Callable[[int], Prompt]:
    Image.new("1", (width, height)).save(file := io.BytesIO(), "PNG")
    given = f"--image-size: an image of {width} x {height} pixels"
    try:
        needed = number * (prep.cut.count(width, height) + 1) + 1  # text comes before each image and after the last
    except ImageError as error:
        raise UserError(f"--image-size: {error}.") from None
    if needed > tokens:
        raise UserError(
            f"{given} takes {prep.cut.count(width, height):,} tokens, and {number} of them do not fit into --max-prompt-length "
            f"{tokens}. Raise it, or lower the pixels in preprocessor_config.json."
        )

    def prompt(ticket: int) -> Prompt:
        sources = [file.getvalue() + f"{ticket} {i}".encode() for i in range(number)]  # each image differs
        ids, found = prep.expand([0, prep.image_token] * number + [0] * (tokens - needed + 1), sources)
        return np.array(ids, np.int32), found

    return prompt


def _pixels(prep: ImagePrep, config: PretrainedConfig, sources: Sequence[bytes], fake: FakeDevice) -> tuple[Tensor, Tensor]:
    """Replaces ImagePrep.prepare."""
    grids = torch.tensor([prep.cut.grid(*size) for size in images.sizes(sources)])
    vision = config.vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    with fake.host_too():
        return torch.zeros(int(grids.prod(1).sum()), patch), grids


@dataclass
class PlannedImages:
    """Replaces rl/learning/batch_images.py."""

    of_groups: list[Images | None]

    def inputs(self, lengths: Sequence[int], after: Sequence[int], owners: Sequence, device: torch.device) -> dict:
        inputs = row_inputs(lengths, after, [self.of_groups[owner] if isinstance(owner, int) else None for owner in owners])
        return inputs | {"position_ids": inputs["position_ids"].to(device)}

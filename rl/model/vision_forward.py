"""The forward pass of a model of images and text over a packed row: the vision tower runs once for each distinct image,
features are put in by place, and positions have three dimensions (rl/data/image_prompts.py explains them).

transformers' own forward finds the places by token id, so that it fails at an image token that the model has sampled by itself.
Everything else here is its own code, in its order: `language_inputs` returns the inputs of its language model.
Left out: rows without prepared images, which the language model takes directly.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.data.image_prompts import Images


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images of a packed row, m image tokens in all. A row without images runs the tower on an image of zeros that changes
    nothing: either all learners run the tower or none, since its parameters are sharded over them."""

    grid: Tensor  # [images, 3] of the distinct ones
    places: Tensor  # [m] the places of image tokens in the row, ascending
    feature: Tensor  # [m] which of the distinct images' features is there
    files: list[tuple[Images, int]]  # the distinct images: a prompt's, and the number among them
    taken: Callable[[], None] | None = None  # called when the pixels have been read

    @staticmethod
    def of(prompts: Sequence[tuple[int, Images]]) -> "RowImages":
        """prompts: (where the tokens begin in the row, their images) of each, in order."""
        first: dict[str, int] = {}  # digest -> the image's first feature
        grid = []
        places = []
        feature = []
        files = []
        end = 0
        for start, images in prompts:
            places.append(start + images.places)
            counts = images.token_counts
            for number, (digest, count) in enumerate(zip(images.digests, counts, strict=True)):
                if digest not in first:
                    first[digest], end = end, end + count
                    grid.append(images.grid[number])
                    files.append((images, number))
                feature.append(first[digest] + torch.arange(count))
        return RowImages(_joined(grid).view(-1, 3), _joined(places), _joined(feature), files)

    def within(self, begin: int, end: int) -> "RowImages":
        """The images of a rank's part of the row. One that lies across a border is computed by both ranks."""
        counts = torch.tensor([images.token_counts[number] for images, number in self.files], dtype=torch.long)
        here = (self.places >= begin) & (self.places < end)
        feature = self.feature[here]
        image_of_feature = torch.arange(len(counts)).repeat_interleave(counts)
        kept, number = image_of_feature[feature].unique(return_inverse=True)
        skipped = counts.cumsum(0)[kept] - counts[kept].cumsum(0)  # features of other images in front of each
        return dataclasses.replace(
            self,
            grid=self.grid[kept],
            places=self.places[here] - begin,
            feature=feature - skipped[number],
            files=[self.files[image] for image in kept],
        )

    def pixels(self) -> Tensor | None:
        """[patches, values of a patch] fp32 on the CPU, of the distinct images; None without any. Raises ImageError."""
        pixels = torch.cat([images.pixels_of(number) for images, number in self.files]) if self.files else None
        if self.taken:
            self.taken()
        return pixels


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """The parts end to end, of which there may be none: [n] long."""
    return torch.cat([torch.zeros(0, dtype=torch.long), *parts])


def row_inputs(lengths: Sequence[int], after: Sequence[int], images: Sequence[Images | None]) -> dict:
    """The inputs of `hidden_states` for a packed row in addition to its ids: position_ids [3, 1, T] and images. lengths: of the
    row's segments; after: the prompt in front of each, -1 for none (rl/model/attention.py); images: of each segment, or of its
    first tokens."""
    positions = []
    prompts = []
    start = 0
    for length, before, own in zip(lengths, after, images, strict=True):
        first = 0
        if before >= 0:
            first = lengths[before] if images[before] is None else images[before].next_position
        known = 0
        if own is not None:
            prompts.append((start, own))
            positions.append(first + own.positions)
            known = own.positions.shape[1]
            first += own.next_position
        positions.append((first + torch.arange(length - known)).expand(3, -1))
        start += length
    return {"position_ids": torch.cat(positions, dim=1)[:, None], "images": RowImages.of(prompts)}


def hidden_states(base: nn.Module, layout, input_ids: Tensor, position_ids: Tensor, images: RowImages | None) -> Tensor:
    """input_ids [1, T], position_ids [3, 1, T] -> hidden states [T, hidden]. base: without its head. No images, no tower."""
    inputs = language_inputs(base, input_ids, images)
    return base.language_model(position_ids=position_ids, use_cache=False, layout=layout, **inputs)[0][0]


def language_inputs(base: nn.Module, input_ids: Tensor, images: RowImages | None) -> dict:
    """The language model's inputs instead of the ids [1, T]: inputs_embeds [1, T, hidden], and for a model with deepstack
    (Qwen3-VL) the features of its first layers."""
    embeds = base.get_input_embeddings()(input_ids)
    if images is None:
        return {"inputs_embeds": embeds}
    device = input_ids.device
    pixels = images.pixels()
    grid = images.grid
    if pixels is None:  # the smallest image, all zeros: one token
        config = base.visual.config
        merge = config.spatial_merge_size
        pixels = torch.zeros(merge**2, config.in_channels * config.temporal_patch_size * config.patch_size**2)
        grid = torch.tensor([[1, merge, merge]])
    found = base.get_image_features(pixels.to(device), grid.to(device), return_dict=True)
    levels = (found.pooler_output, *getattr(found, "deepstack_features", ()))
    # [features, hidden] each; transformers before 5.6 gives the deeper ones whole, later ones image by image
    levels = [level if torch.is_tensor(level) else torch.cat(level) for level in levels]
    if not images.files:  # out of place: gradients of zero for the tower, the same bits for the row
        return {"inputs_embeds": embeds + 0.0 * sum(level.sum() for level in levels).to(embeds.dtype)}
    feature = images.feature.to(device)
    places = images.places.to(device)
    first, *deeper = (level.index_select(0, feature).to(embeds.dtype) for level in levels)
    inputs = {"inputs_embeds": embeds[0].index_copy(0, places, first)[None]}
    if deeper:
        inputs["visual_pos_masks"] = torch.zeros_like(input_ids, dtype=torch.bool).index_fill(1, places, True)
        inputs["deepstack_visual_embeds"] = deeper
    return inputs


def embed_by_product(model: nn.Module) -> None:
    """Has the tower embed patches by a matrix product, since a convolution with steps as long as its kernel is nothing else. On
    a CPU torch's convolution takes about seven times as long forward and ten times as long backward (benchmarks/LOG.md)."""
    embed = model.model.visual.patch_embed
    conv = embed.proj
    if isinstance(conv, nn.Conv3d) and conv.stride == conv.kernel_size and not any(conv.padding) and conv.groups == 1:
        embed.forward = functools.partial(_embedded, conv)


def _embedded(conv: nn.Conv3d, pixels: Tensor) -> Tensor:
    """pixels [patches, values of a patch] -> [patches, hidden]."""
    return F.linear(pixels.to(conv.weight.dtype), conv.weight.flatten(1), conv.bias)

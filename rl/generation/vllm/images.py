"""Images in prompts for vLLM: the learner's own pixels, past vLLM's own preparation of images.

Left to itself vLLM decodes, resizes and normalises each image once more, with another library than the learner where there is
torchvision, and puts as many tokens into the prompt as it counts. Here a request brings what the learner computes with: the ids
and places that rl/data/image_prompts.py made, and patches for the vision tower. vLLM begins with the tower, so that it loads no
image processor, and a CPU without torchvision will do.
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.util import find_spec

import torch
import vllm
from transformers import BatchFeature, PretrainedConfig
from transformers.utils import logging
from vllm import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo

from rl.data.image_prompts import Images
from rl.errors import UserError

KNOWN = ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")  # of one layout
ARCHITECTURES = tuple(f"{name}ForConditionalGeneration" for name in KNOWN)
TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"  # which vLLM imports a formula from


class Limits(BaseProcessingInfo):
    """Prompts may have any number of images, each of any size that fits in a sequence."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": seq_len}


class Processor(BaseMultiModalProcessor[Limits]):
    """In place of a model's own processor: images have been prepared when they come."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(self, mm_counts, **_) -> dict:
        """The largest image, for vLLM to find out how much memory the tower needs."""
        vision = self.info.get_hf_config().vision_config
        merge, tokens = vision.spatial_merge_size, self.info.ctx.model_config.max_model_len
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        item = _item(torch.zeros(merge * merge * tokens, patch), torch.tensor([1, merge, merge * tokens]))
        return {"mm_kwargs": {"image": [item]}}

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        raise NotImplementedError

    def _get_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs):
        raise NotImplementedError


class PreparedImages:
    """vLLM made to take prepared images, before an engine of this model starts."""

    def __init__(self, config: PretrainedConfig, where: str):
        """where: names the model in a message. Raises UserError for one whose pixels vLLM may take in another layout."""
        architecture = (config.architectures or ["?"])[0]
        if architecture not in ARCHITECTURES:
            known = " and ".join(ARCHITECTURES)
            raise UserError(
                f"{where}: --engine vllm takes images for {known} alone, not {architecture}. Try --engine transformers."
            )
        model_class = vllms_class(architecture)
        if "_processor_factory" in vars(model_class):
            del model_class._processor_factory  # vLLM warns where one takes the place of another
        MULTIMODAL_REGISTRY.register_processor(Processor, info=Limits, dummy_inputs=lambda info: None)(model_class)
        ModelRegistry.register_model(architecture, model_class)  # as it is now; vLLM would look at it in another process
        self.patches_per_token = config.vision_config.spatial_merge_size**2

    def settings(self, on_accelerator: bool) -> dict[str, object]:
        """Of vllm.EngineArgs: what makes vLLM leave prepared pixels as they are."""
        wanted = {
            "mm_device_do_normalize": False,  # else newer versions' towers normalise the pixels a second time
            "mm_processor_cache_gb": 0,
            "limit_mm_per_prompt": {"video": 0},
        }
        known = vllm.EngineArgs.__dataclass_fields__
        # Nobody measures a CPU's memory. Versions without the first setting ask another class, which prepared images have not
        # got, for their largest image.
        wanted["skip_mm_profiling"] = not on_accelerator or "mm_device_do_normalize" not in known
        return {name: value for name, value in wanted.items() if name in known}

    def prompt(self, images: Images, ids: list[int], salt: str) -> dict:
        """The prompt `ids` with its images in vLLM's form. KV blocks and the tower's outputs are shared where an image's digest
        and the salt, that of the weights, are the same."""
        lengths = images.grid.prod(-1) // self.patches_per_token
        starts = images.places[lengths.cumsum(0) - lengths]
        return {
            "type": "multimodal",
            "prompt_token_ids": ids,
            "mm_kwargs": {"image": [_item(images.pixels_of(i), grid) for i, grid in enumerate(images.grid)]},
            "mm_hashes": {"image": [f"{digest}/{salt}" for digest in images.digests]},
            "mm_placeholders": {"image": list(map(PlaceholderRange, starts.tolist(), lengths.tolist()))},
            "cache_salt": salt,
        }


def vllms_class(architecture: str) -> type:
    """vLLM's class for it, for whose import torchvision need not be there."""
    if find_spec("torchvision") is None:  # the same formula is in the processor that does without
        sys.modules.setdefault(TORCHVISION, importlib.import_module(TORCHVISION.replace("_processing_", "_processing_pil_")))
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # that another image processor is imported, which is not used
    try:
        return ModelRegistry.models[architecture].load_model_cls()
    finally:
        logging.set_verbosity(level)


def _item(pixels: torch.Tensor, grid: torch.Tensor) -> MultiModalKwargsItem:
    """One image's pixels [patches, values of a patch] and grid [3] as vLLM has them, not copied."""
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod()[None]),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    batch = BatchFeature({"pixel_values": pixels, "image_grid_thw": grid[None]})
    return MultiModalKwargsItems.from_hf_inputs(batch, fields)["image"][0]

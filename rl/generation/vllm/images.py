"""Images in prompts for vLLM: it gets the learner's pixels and does not prepare images itself.

Otherwise vLLM would decode, resize and normalise each image again, perhaps with another library than the learner, and insert
its own number of tokens. Here a request has the ids and places from rl/data/image_prompts.py, and patches for the vision tower.
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

KNOWN = ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")  # all with the same layout of pixels
ARCHITECTURES = tuple(f"{name}ForConditionalGeneration" for name in KNOWN)
TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"  # vLLM imports a formula from it


class Limits(BaseProcessingInfo):
    """Any number of images in a prompt, each of any size that fits in a sequence."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": seq_len}


class Processor(BaseMultiModalProcessor[Limits]):
    """Replaces a model's processor, because images are already prepared."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(self, mm_counts, **_) -> dict:
        """Return the largest image, with which vLLM measures the tower's memory."""
        vision = self.info.get_hf_config().vision_config
        merge = vision.spatial_merge_size
        tokens = self.info.ctx.model_config.max_model_len
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        item = _item(torch.zeros(merge * merge * tokens, patch), torch.tensor([1, merge, merge * tokens]))
        return {"mm_kwargs": {"image": [item]}}

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        raise NotImplementedError

    def _get_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs):
        raise NotImplementedError


class PreparedImages:
    """Makes vLLM accept prepared images. Create it before an engine of this model starts."""

    def __init__(self, config: PretrainedConfig, where: str):
        """where: names the model in the UserError for a model whose pixels vLLM may expect in another layout."""
        architecture = (config.architectures or ["?"])[0]
        if architecture not in ARCHITECTURES:
            known = " and ".join(ARCHITECTURES)
            raise UserError(f"{where}: --engine vllm takes images for {known}, not {architecture}. Try --engine embedded.")
        model_class = vllms_class(architecture)
        if "_processor_factory" in vars(model_class):
            del model_class._processor_factory  # vLLM warns if one is replaced
        MULTIMODAL_REGISTRY.register_processor(Processor, info=Limits, dummy_inputs=lambda info: None)(model_class)
        ModelRegistry.register_model(architecture, model_class)  # this class; vLLM would import its own in another process
        # vLLM reads these experts only as the hub has them; the learner sends its own.
        self.load_format = "dummy" if architecture.startswith("Qwen3VLMoe") else "auto"
        self.patches_per_token = config.vision_config.spatial_merge_size**2

    def settings(self, on_accelerator: bool) -> dict[str, object]:
        """Return the settings of vllm.EngineArgs with which vLLM leaves prepared pixels unchanged."""
        wanted = {
            "mm_device_do_normalize": False,  # otherwise newer versions' towers normalise the pixels a second time
            "mm_processor_cache_gb": 0,
            "limit_mm_per_prompt": {"video": 0},
            "load_format": self.load_format,
        }
        known = vllm.EngineArgs.__dataclass_fields__
        # The memory of a CPU is not measured. Versions without the first setting get the largest image from a class that
        # prepared images do not have.
        wanted["skip_mm_profiling"] = not on_accelerator or "mm_device_do_normalize" not in known
        return {name: value for name, value in wanted.items() if name in known}

    def prompt(self, images: Images, ids: list[int], salt: str) -> dict:
        """Return the prompt `ids` with its images in vLLM's form. KV blocks and the tower's outputs are shared between equal
        images with the same salt, which stands for the weights."""
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
    """Return vLLM's class for the architecture. Its import works even without torchvision. Raise UserError if it has none."""
    if architecture not in ModelRegistry.models:
        raise UserError(f"--engine vllm: vLLM {vllm.__version__} does not know {architecture}. Take --engine embedded.")
    if find_spec("torchvision") is None:  # the processor without torchvision has the same formula
        sys.modules.setdefault(TORCHVISION, importlib.import_module(TORCHVISION.replace("_processing_", "_processing_pil_")))
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn about an image processor that is not used
    try:
        return ModelRegistry.models[architecture].load_model_cls()
    finally:
        logging.set_verbosity(level)


def _item(pixels: torch.Tensor, grid: torch.Tensor) -> MultiModalKwargsItem:
    """Return one image's pixels [patches, values of a patch] and grid [3] in vLLM's form, without a copy."""
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod()[None]),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    batch = BatchFeature({"pixel_values": pixels, "image_grid_thw": grid[None]})
    return MultiModalKwargsItems.from_hf_inputs(batch, fields)["image"][0]

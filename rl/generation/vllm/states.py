"""Models with recurrent states (rl/model/hybrid/) in vLLM."""

import vllm
from vllm import ModelRegistry

from rl.data.image_prompts import takes_images
from rl.generation.vllm.images import vllms_class

STATES = "float32"  # vLLM's own choice is the model's precision, where config.json names none


def settings(config) -> dict[str, object]:
    """Of vllm.EngineArgs. Before the engine starts."""
    if not takes_images(config):  # vLLM has text and images in one module, which wants torchvision
        for architecture in config.architectures:
            ModelRegistry.register_model(architecture, vllms_class(architecture))
    return {"mamba_ssm_cache_dtype": STATES}


def check_states(engine: "vllm.LLMEngine") -> None:
    """Raises RuntimeError where vLLM has taken another precision: log-probs would drift away from the learner's."""
    if (found := engine.vllm_config.cache_config.mamba_ssm_cache_dtype) != STATES:
        raise RuntimeError(f"vLLM keeps recurrent states in {found}, not in {STATES}")

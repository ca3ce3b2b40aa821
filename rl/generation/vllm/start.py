"""Helpers to start vLLM: flags that it cannot follow, its place among the ranks, the log-probs of its sampler, and recurrent
states."""

import contextlib
import random
import uuid
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from vllm import ModelRegistry
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rl.errors import UserError
from rl.generation.engine import EngineArgs, SamplingArgs
from rl.model.pretrained import takes_images
from rl.ranks.dist import from_main

LOGPROBS_MODE = "processed_logprobs"  # of the distribution that was sampled; raw ones ignore the temperature
HIGHEST_TEMPERATURE = 2.0  # limit of vLLM's sampling parameters


def check_flags(args: EngineArgs, sampling: SamplingArgs, max_length: int, splits_prompts: bool) -> None:
    """Raise UserError for flags that vLLM cannot follow here. splits_prompts: over several steps."""
    if not splits_prompts and args.max_num_batched_tokens < max_length:
        raise UserError(
            f"--max-num-batched-tokens {args.max_num_batched_tokens} is less than one sequence, {max_length} tokens (prompt + "
            "response). On a CPU a prompt is not split over several steps: raise it."
        )
    hottest, flag = max((sampling.temperature, "--temperature"), (sampling.val_temperature, "--val-temperature"))
    if hottest > HIGHEST_TEMPERATURE:
        raise UserError(
            f"{flag} {hottest:g}: vLLM samples at {HIGHEST_TEMPERATURE:g} at most. Lower it, or take --engine embedded."
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % args.rollout_tp:
        raise UserError(
            f"--rollout-tp {args.rollout_tp}: the {world} generating rank(s) cannot be divided into generators of that many. "
            "Start a multiple of it with `torchrun --standalone --nproc-per-node ...`."
        )


@torch.no_grad()
def give_sampled_log_probs(sampler, device: torch.device) -> None:
    """Make vLLM's sampler return log-probs of the distribution that it samples. vllm-ascend's sampler ignores the setting at
    startup but follows it later. Raise UserError for a sampler that does not follow it."""
    if getattr(sampler, "logprobs_mode", None) == LOGPROBS_MODE:
        return
    inner = getattr(sampler, "topk_topp_sampler", None)
    if inner is not None and hasattr(sampler, "logprobs_mode"):
        sampler.logprobs_mode = inner.logprobs_mode = LOGPROBS_MODE
        logits = torch.linspace(-2, 2, 8).repeat(2, 1).to(device)
        _, given = inner(logits.clone(), {}, None, None)
        if given is not None and torch.allclose(given, logits.log_softmax(-1), atol=1e-4):
            return
    raise UserError(
        f"--engine vllm: the sampler of this vLLM, {type(sampler).__module__}.{type(sampler).__name__}, gives log-probs of the "
        "model before temperature, top-k and top-p, not of what it samples: the policy's ratios would be wrong. Install the "
        "versions in docs/engines.md, or take --engine embedded."
    )


def settings_of_states(config, splits_prompts: bool) -> dict[str, object]:
    """Return settings of vllm.EngineArgs for recurrent states (rl/model/hybrid/). Call it before the engine starts."""
    if not takes_images(config):  # vLLM has text and images in one module, which needs torchvision
        from rl.generation.vllm.images import vllms_class

        for architecture in config.architectures:
            ModelRegistry.register_model(architecture, vllms_class(architecture))
    # without a dtype in config.json, vLLM would choose the model's for the states
    return {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": splits_prompts}


@contextlib.contextmanager
def random_state_kept():
    """Restore the random number generators at the end: vLLM reseeds them, and the run's other draws must not depend on that."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextlib.contextmanager
def place_among_ranks(device: torch.device):
    """Give a starting vLLM its rank in the default process group, from which it makes its own groups. Otherwise it would read
    torchrun's variables, which count differently if ranks are split into roles or share a device.

    The init method's last part names the memory that tensor parallel ranks share on a CPU. vLLM's default name is the same in
    every run: two runs on a machine would collide, as would a run with the remains of one that was killed.
    """
    if not dist.is_initialized():
        yield
        return
    run = from_main(uuid.uuid4().hex)
    place = (f"env://:{run}", dist.get_rank(), device.index or 0)
    original = ExecutorWithExternalLauncher._distributed_args
    ExecutorWithExternalLauncher._distributed_args = lambda self: place
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = original
        for path in Path("/dev/shm").glob(f"{run}-*"):
            path.unlink(missing_ok=True)  # all ranks have it open; without a name it disappears with the last of them

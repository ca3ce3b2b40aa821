"""The models of a learner: read, sharded, and in the memory and the precision that the flags ask for.

A rank that learns alone in fp32 on its own device does without FSDP (rl/learning/sharding.py): there is nothing to gather, to
cast or to reduce, and FSDP would still copy weights and gradients, which takes a tenth or more of a small model's step.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rl.learning.args import LearnerArgs
from rl.model.attention import dtype_of
from rl.model.loading import fill, open_weights, places_of
from rl.model.policy import LOGITS_KEPT, Policy, check_policy
from rl.model.pretrained import empty_model, load_config
from rl.ranks import dist
from rl.ranks.device import is_accelerator
from rl.ranks.dist import Ranks

FLAGS = {"teacher": "--teacher", "critic": "--critic-model"}  # that name the models of these roles; --model names the others


def load_policy(
    path: str,
    args: LearnerArgs,
    ranks: Ranks,
    role: Literal["policy", "reference", "teacher", "critic"],
    trust_remote_code: bool,
    seed: int = 0,
    kind: type[Policy] = Policy,
    is_known: bool = False,
) -> Policy:
    """Return the model at `path` (a directory or a hub name), sharded over all ranks; each reads only its part of the weights.
    They are in fp32 if they are trained, else frozen in --dtype, and on an accelerator in host memory while not in use. seed:
    of adapters. is_known: the policy has been read and checked from the same files. Raise UserError if weights are missing or
    log-probs differ from those of transformers."""
    trainable = role in ("policy", "critic")
    offload = args.param_offload if trainable else is_accelerator(ranks.device)
    flag = FLAGS.get(role, "--model")
    if ranks.is_main:
        weights = open_weights(path, trust_remote_code, not is_known, flag)
        if not is_known:
            with weights.by_layer():
                check_policy(Policy(weights.model).eval(), path, flag)
            print(f"loading {path}", flush=True)
    dist.from_main(None)  # the first rank has downloaded the files, and refuses for all
    if not ranks.is_main:
        weights = open_weights(path, trust_remote_code, False, flag)
    model = empty_model(load_config(path, trust_remote_code), trust_remote_code)
    model.requires_grad_(trainable)
    if args.freeze_vision_tower:
        model.model.visual.requires_grad_(False)
    adapters = None
    if args.adapted and trainable:
        from rl.learning.adapters import adapt  # late: no other run needs it

        adapters = adapt(model, args, f"--model {path}")
    if trainable and args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.compile:
        from rl.model.compiled import compile_layers

        compile_layers(model, path)
    elif trainable and is_accelerator(ranks.device):
        from rl.model.liger import use_kernels

        use_kernels(model, getattr(torch, args.dtype), ranks.device, ranks.is_main)
    logits_kept = 0 if args.gradient_checkpointing else LOGITS_KEPT
    policy = kind(model, logits_kept)
    policy.adapters = adapters
    _compute_as_sampled(policy)
    if args.dtype == "bfloat16" and (adapters or not trainable):
        for name, parameter in policy.named_parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype_of(name, torch.bfloat16))
    # FSDP also casts the inputs of layers, which a model of images in bf16 needs.
    casts = args.dtype == "bfloat16" and (trainable or policy.takes_images)
    sharded = ranks.world_size > 1 or offload or casts
    if sharded:
        from rl.learning.sharding import shard

        shard(policy, args, ranks, offload)
    _take_memory(policy, "cpu" if offload else ranks.device, tie=not sharded)
    fill(model, weights, ranks)
    if adapters:
        adapters.begin(model, seed)
    return policy


def _take_memory(policy: Policy, device: torch.device | str, tie: bool) -> None:
    """Allocate memory for all parameters, without values. tie: keep names of one parameter tied, which FSDP does on its own."""
    places = places_of(policy)
    policy.to_empty(device=device)
    for (first, name), *others in places.values() if tie else ():
        for module, leaf in others:
            setattr(module, leaf, getattr(first, name))


def _compute_as_sampled(policy: Policy) -> None:
    """Ensure that the learning policy computes as the sampling one did: no dropout, no noise on a router, whatever the config
    says. Only gradient checkpointing asks a layer whether it trains, before the layer's forward."""
    policy.eval()
    for layer in policy.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            layer.training = True
            layer.forward = partial(_in_eval, layer, layer.forward)


def _in_eval(layer: nn.Module, forward: Callable, *args, **kwargs):
    layer.training = False
    try:
        return forward(*args, **kwargs)
    finally:
        layer.training = True

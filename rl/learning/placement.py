"""The models of a learner: read, sharded, and in the memory and the precision that the flags ask for.

FSDP2 shards every decoder layer and the rest, unless one rank learns alone and on its device: there is nothing to gather or to
reduce, and FSDP would still copy weights and gradients, which takes a tenth or more of a small model's step. In bf16 such a
rank computes with weights that were cast once per update (rl/learning/masters.py).
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl.adapters.lora import adapt
from rl.learning.activation_offload import keep_inputs_on_host
from rl.learning.args import LearnerArgs
from rl.learning.masters import keep_in_bf16
from rl.model.attention import IN_FP32
from rl.model.loading import fill, open_weights
from rl.model.policy import LOGITS_KEPT, Policy, check_policy
from rl.model.pretrained import empty_model, layers, load_config
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
    They are in fp32 if they are trained, else frozen in --dtype. seed: of adapters. is_known: the policy has been read and
    checked from the same files. Raise UserError if weights are missing or log-probs differ from those of transformers."""
    trainable = role in ("policy", "critic")
    offload = args.param_offload if trainable else args.ref_offload and is_accelerator(ranks.device)
    flag = FLAGS.get(role, "--model")
    weights = open_weights(path, trust_remote_code, not is_known, flag) if ranks.is_main else None
    if weights and not is_known:
        with weights.by_layer():
            check_policy(Policy(weights.model).eval(), path, flag)
    model = empty_model(load_config(path, trust_remote_code), trust_remote_code)
    model.requires_grad_(trainable)
    if args.freeze_vision_tower:
        model.model.visual.requires_grad_(False)
    adapters = adapt(model, args, f"--model {path}") if args.adapted and trainable else None
    if adapters and args.dtype == "bfloat16":
        keep_in_bf16(named for named in model.named_parameters() if not named[1].requires_grad)
    _save_memory(model, args, path, ranks.device if trainable else None, ranks.is_main)
    logits_kept = 0 if args.gradient_checkpointing else LOGITS_KEPT
    policy = kind(model, logits_kept)
    policy.adapters = adapters
    _compute_as_sampled(policy)
    if args.dtype == "bfloat16" and not trainable:
        keep_in_bf16(policy.named_parameters())
    sharded = _shard(policy, args, ranks, offload)
    _take_memory(policy, "cpu" if offload else ranks.device, tie=not sharded)
    fill(model, weights, path, ranks, not is_known, flag)
    if adapters:
        adapters.begin(model, seed)
    return policy


def _save_memory(model: PreTrainedModel, args: LearnerArgs, path: str, trained_on: torch.device | None, say: bool) -> None:
    """Change the layers so that they keep less, or are compiled. trained_on: the device; None for a frozen model."""
    if trained_on and args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if args.activation_offload:
            keep_inputs_on_host(model, trained_on)
    if args.compile:
        from rl.model.compiled import compile_layers

        compile_layers(model, path)
    elif trained_on and is_accelerator(trained_on):
        from rl.model.liger import use_kernels

        use_kernels(model, getattr(torch, args.dtype), trained_on, say)


def _shard(policy: Policy, args: LearnerArgs, ranks: Ranks, offload: bool) -> bool:
    """Leave each rank its part of every layer. Return False if there is nothing to gather, to reduce or to move. A model of
    images in bf16 is sharded anyway, because FSDP also casts the inputs of its layers."""
    options = {"mesh": ranks.mesh["data"]}
    if "bfloat16" in (args.dtype, args.grad_dtype):
        computed, reduced = getattr(torch, args.dtype), getattr(torch, args.grad_dtype)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=reduced)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=is_accelerator(ranks.device))
    alone = ranks.world_size == 1 and not offload and args.grad_dtype == "float32"
    if alone and (args.dtype == "float32" or not policy.takes_images):
        return False
    if ranks.expert_parallel > 1:
        from rl.model.expert_parallel import divide_experts

        divide_experts(policy.model, ranks, options)
    for layer in layers(policy.model):
        # FSDP casts whole groups: the parameters that stay in fp32 are a group of their own.
        apart = {parameter for name, parameter in layer.named_parameters() if f".{name}".endswith(IN_FP32)}
        own = {"ignored_params": apart} if apart and args.dtype == "bfloat16" else {}
        fully_shard(layer, **options, **own)
        if own:
            uncast = options | {"mp_policy": replace(options["mp_policy"], param_dtype=None)}
            fully_shard(layer.linear_attn, **uncast, ignored_params=set(layer.parameters()) - apart)
    fully_shard(policy, **options)
    for module in policy.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)  # sum, not mean
            module.set_force_sum_reduction_for_comms(True)
    return True


def _take_memory(policy: Policy, device: torch.device | str, tie: bool) -> None:
    """Allocate memory for all parameters, without values. tie: keep names of one parameter tied, which FSDP does on its own."""
    names = defaultdict(list)
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    policy.to_empty(device=device)
    for first, *others in names.values() if tie else ():
        for name in others:
            module, _, leaf = name.rpartition(".")
            setattr(policy.get_submodule(module), leaf, policy.get_parameter(first))


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

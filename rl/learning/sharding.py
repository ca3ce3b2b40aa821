"""FSDP2 shards every decoder layer and the rest: weights in fp32, which it casts to --dtype where they are gathered, and
gradients summed in fp32."""

from dataclasses import replace

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from rl.learning.args import LearnerArgs
from rl.model.attention import IN_FP32
from rl.model.policy import Policy
from rl.model.pretrained import layers
from rl.ranks.device import is_accelerator
from rl.ranks.dist import Ranks


def shard(policy: Policy, args: LearnerArgs, ranks: Ranks, offload: bool) -> None:
    """Leave each rank its part of every layer. offload: to host memory."""
    options = {"mesh": ranks.mesh["data"]}
    if args.dtype == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=is_accelerator(ranks.device))
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

"""Started by test_lora.py: twelve updates of adapters, laid out in several ways.

torchrun ... adapters.py MODEL OUT
"""

import sys

import torch
from helpers import make_group, whole

from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.learning.micro_batches import micro_batches
from rl.model.shards import Block, local
from rl.ranks import process

CASES = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "offload": {"param_offload": True},
    "bf16": {"dtype": "bfloat16"},
    "bf16, moments on the host": {"dtype": "bfloat16", "optimizer_offload": True},
}


def draw_b(learner: Learner) -> None:
    """Has the adapters do something, the same on any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    for name in learner.adapters.tensors:
        if name.endswith("lora_B"):
            parameter = learner.policy.model.get_parameter(name).data
            drawn = torch.randn(parameter.shape, generator=generator) * 0.1
            local(parameter).copy_(drawn[Block.of(parameter).slices()])


def main(ranks):
    model, out = sys.argv[1:3]
    batch = Batch.of([make_group(t, [5 + t, 9, 3], prompt=3 + t) for t in range(4)])
    weight = torch.linspace(-1, 1, len(batch.token))
    cases = CASES | {"sequence parallel": {"sequence_parallel": ranks.world_size}}
    result = {}
    for case, flags in cases.items():
        args = LearnerArgs(lora_rank=3, lora_alpha=6, lr=1e-3, lr_warmup_steps=0, **flags)
        learner = Learner(model, args, ranks, 10, with_reference=True, seed=5)
        own = {name: learner.policy.model.get_parameter(name) for name in learner.adapters.tensors}
        started = torch.cat([whole(own[name]).detach().flatten().cpu() for name in own])
        draw_b(learner)
        result[case] = {"start": started, "published": joined(published(learner))}
        for update in range(12):
            for micro in micro_batches(batch, torch.arange(12), 60, learner.ranks):
                log_prob = learner.forward(micro).log_prob
                (log_prob * weight[micro.index]).sum().backward()
            if not update:
                result[case]["gradient"] = joined({name: parameter.grad for name, parameter in own.items()})
            learner.step()
        result[case]["learned"] = joined(published(learner))
        assert {parameter.dtype for parameter in learner.frozen.values()} == {getattr(torch, args.dtype)}
    if ranks.is_main:
        torch.save(result, out)


def published(learner: Learner) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, learner.args.dtype)
    return {name: tensor.to(dtype) for name, tensor in learner.weights(dtype)}


def joined(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([whole(tensor).detach().flatten().float().cpu() for tensor in tensors.values()])


process.run(main)

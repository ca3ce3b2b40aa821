"""Expert parallelism: neighbouring learners share the experts of each layer.

Without it every rank gathers all experts of a layer, as FSDP does with the rest. With it a rank keeps its own experts, and the
tokens travel: sorted by expert, each goes to the rank of its expert and comes back (all-to-all). This sends less if experts are
large and a rank's tokens are few, and it helps where gathering would go over a slow network. The ranks that hold the same
experts shard them among each other by FSDP, so that a rank holds as many parameters as it would otherwise.

It can be combined with sequence parallelism on the same ranks. Left out: models whose experts are not laid out as in Qwen3-MoE,
capacity limits (no token is dropped), overlap of a layer's all-to-all, or of gathering its parameters, with computation.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig

from rl.errors import UserError
from rl.ranks.dist import Ranks, all_reduce_sum
from rl.ranks.gathering import AllToAll

NAMES = {"gate_up_proj", "down_proj"}  # an experts module's parameters, [E, ...] each


def share_experts(ranks: Ranks, config: PretrainedConfig, size: int) -> Ranks:
    """The learners, of which every `size` neighbours share the experts. Raises UserError if these cannot be divided evenly."""
    given = f"--expert-parallel {size}"
    count = getattr(config.get_text_config(), "num_experts", None)
    if not count:
        raise UserError(f"{given}: the model has no experts that could be divided. Leave the flag out.")
    if ranks.world_size % size:
        raise UserError(f"{given} does not divide the {ranks.world_size} learners. Take a divisor of their number.")
    if count % ranks.world_size:
        raise UserError(
            f"{given}: {ranks.world_size} learners cannot hold equally many of the model's {count} experts a layer. Take a "
            "number of learners that divides them, or leave the flag out."
        )
    return dataclasses.replace(ranks, expert_parallel=size)


def experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold a layer's experts."""
    for module in model.modules():
        if {name for name, _ in module.named_parameters(recurse=False)} == NAMES:
            yield module


def divide_experts(model: nn.Module, ranks: Ranks, shard: dict) -> None:
    """Leaves every rank its own experts, without values, before the layers around them are sharded. shard: for fully_shard."""
    mesh = ranks.expert_mesh["expert"]
    shard = shard | {"mesh": ranks.expert_mesh["shard"]}
    if policy := shard.get("mp_policy"):
        shard["mp_policy"] = dataclasses.replace(policy, cast_forward_inputs=False)  # weights of experts may be fp32
    if not (found := list(experts_of(model))):
        raise UserError(
            f"--expert-parallel {ranks.expert_parallel}: {type(model).__name__} does not hold its experts as "
            f"{' and '.join(sorted(NAMES))}, which alone are divided here. Leave the flag out."
        )
    for experts in found:
        own = experts.num_experts // ranks.expert_parallel
        plain = copy.copy(experts)  # computes with the tensors that it is given
        plain._parameters = {}
        plain.num_experts = own
        for name, whole in list(experts.named_parameters()):
            part = torch.empty(own, *whole.shape[1:], dtype=whole.dtype, device="meta")
            divided = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(divided, requires_grad=whole.requires_grad))
        experts.forward = functools.partial(_forward, experts, plain, mesh.get_group())
        fully_shard(experts, **shard)


def _forward(experts: nn.Module, plain: nn.Module, group, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor):
    """Sends each token, hidden [t, d], to its experts, index and weight [t, K], and their output [t, d] back. plain: a copy of
    the module without parameters, for this rank's experts. A collective of the group."""
    own_experts = copy.copy(plain)
    own_experts.__dict__.update({name: getattr(experts, name).to_local() for name in NAMES})  # as FSDP has gathered them
    ranks = group.size()
    own = plain.num_experts
    choices = index.shape[1]
    order = index.flatten().argsort(stable=True)  # [t * K], by expert and so by rank
    count = torch.zeros(ranks * own, dtype=torch.long, device=index.device)
    count = count.scatter_add_(0, index.flatten(), torch.ones_like(order))  # [E] this rank's rows for each expert
    arriving, sent, received = rows_to_trade(count, len(order), group)
    rows = F.embedding(order // choices, hidden)  # [t * K, d]; the backward pass of `[]` would add in the order of threads
    rows = AllToAll.apply(rows, sent, received, group)  # [R, d]
    expert = torch.arange(own, device=index.device).repeat(ranks).repeat_interleave(arriving, output_size=len(rows))  # [R]
    out = AllToAll.apply(_compute(own_experts, rows, expert), received, sent, group)  # [t * K, d] in `order`
    by_token = out[order.argsort()].view(*index.shape, -1)  # [t, K, d]
    return (by_token * weight[..., None]).sum(1).to(hidden.dtype)


def rows_to_trade(count: torch.Tensor, rows: int, group) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the rows that arrive from each rank for each of this rank's experts [E], and the numbers of rows to send to and
    receive from each rank. count [E]: this rank's rows for each expert of all ranks; rows: their sum, for plan.py."""
    arriving = torch.empty_like(count)
    torch.distributed.all_to_all_single(arriving, count, group=group)
    sent, received = torch.stack([count, arriving]).view(2, group.size(), -1).sum(2).tolist()  # the only wait for the device
    return arriving, sent, received


def _compute(own_experts: nn.Module, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """rows [R, d], each through the expert [R] of this rank. If there is no row, one of zeros is computed: the parameters must
    have a gradient on every rank, because FSDP sums it over the ranks."""
    if not len(rows):
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return own_experts(rows, expert.new_zeros(1, 1), rows.new_ones(1, 1))[:0]
    return own_experts(rows, expert[:, None], rows.new_ones(len(rows), 1))


def clip_grad_norm(parameters: Iterable[nn.Parameter], largest: float) -> float:
    """Clips gradients that are sharded over different meshes, and returns their norm. torch's own function takes one mesh."""
    grads = [p.grad.to_local() for p in parameters if p.grad is not None]  # no element is on two ranks
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]  # of gradients in bf16, too
    own = torch.stack(norms).norm().cpu().double()  # over the host: collectives of devices may not take float64
    norm = float(all_reduce_sum(own.square()).sqrt())
    if (factor := largest / (norm + 1e-6)) < 1:
        torch._foreach_mul_(grads, factor)
    return norm

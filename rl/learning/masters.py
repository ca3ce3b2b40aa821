"""Separates the fp32 weights that training changes from the bf16 weights that compute: in host memory, or on the device if a
rank learns alone.

A sum over many small steps needs fp32, but the forward and backward pass only see each weight rounded to bf16, so the model
only keeps the rounded ones. With --optimizer-offload the optimizer brings the fp32 weights to the device piece by piece, with
their moments. A rank that learns alone does not need FSDP, which would cast each weight again for every micro-batch: gradients
are summed in fp32 as they arrive. Weights, gradients and metrics equal those of FSDP with fp32 weights on the device, bit for
bit. Left out: weights that are not trained; they stay in fp32 there.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rl.errors import UserError
from rl.model.attention import dtype_of
from rl.model.shards import local, zeros_on_host
from rl.ranks.device import PinnedBlocks


@torch.no_grad()
def set_apart(policy: nn.Module, on_host: bool) -> dict[str, torch.Tensor]:
    """Cast the trained parameters of policy.model to bf16. Return the fp32 ones by name, with the same sharding. Call it before
    the first forward pass and before making the optimizer."""
    trained = {name: parameter for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    pinned = PinnedBlocks()
    masters = {name: _to_host(parameter, pinned) if on_host else parameter.data for name, parameter in trained.items()}
    if isinstance(policy, FSDPModule):
        kept = {parameter for name, parameter in trained.items() if dtype_of(name, torch.bfloat16) != torch.bfloat16}
        rounds = lambda tensor: tensor.requires_grad and tensor not in kept  # noqa: E731
        policy._apply(lambda tensor: tensor.bfloat16() if rounds(tensor) else tensor)  # FSDP keeps its own record of them
        policy._get_fsdp_state()._lazy_init()
        for module in policy.modules():
            if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
                if not hasattr(group, "_orig_dtype"):
                    raise UserError("--optimizer-offload: this torch's FSDP would round gradients. Install the pinned version.")
                group._orig_dtype = None  # FSDP would round reduced gradients to the parameters' precision
    else:
        keep_in_bf16(trained.items())
        for parameter in trained.values():
            parameter.register_post_accumulate_grad_hook(_to_fp32)
    for parameter in policy.parameters():
        parameter.grad_dtype = None  # any: gradients arrive in --grad-dtype
    return masters


def keep_in_bf16(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Round parameters that FSDP does not manage."""
    for name, parameter in named:
        parameter.data = parameter.data.to(dtype_of(name, torch.bfloat16))


def _to_host(parameter: nn.Parameter, pinned: PinnedBlocks) -> torch.Tensor:
    master = zeros_on_host(parameter.data, parameter.dtype, pinned)
    local(master).copy_(local(parameter))
    return master


def _to_fp32(parameter: nn.Parameter) -> None:
    """Keep the first micro-batch's gradient; those of later ones are added to it."""
    parameter.grad = parameter.grad.float()


@torch.no_grad()
def take_masters(parameters: dict[str, nn.Parameter], masters: dict[str, torch.Tensor]) -> None:
    """Copy the masters, which a checkpoint was read into, to the parameters."""
    for name, master in masters.items():
        local(parameters[name]).copy_(local(master))

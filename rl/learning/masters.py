"""The fp32 weights that training changes, apart from those in bf16 that are computed with: in host memory, or next to them
where a rank learns alone.

A sum over many small steps needs fp32, but the forward and the backward pass see each weight rounded to bf16. So the model
keeps just that. With --optimizer-offload the optimizer brings the fp32 weights to the device a piece at a time, with their
moments. Where a rank learns alone, FSDP, which would cast each weight again for every micro-batch, is not needed: gradients
are added up in fp32 as they come. Weights, gradients and metrics are those that FSDP computes of fp32 weights on the device,
bit for bit. Left out: weights that are not trained; they stay in fp32 there.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rl.model.attention import dtype_of
from rl.model.shards import local, zeros_on_host
from rl.ranks.host_memory import PinnedBlocks


@torch.no_grad()
def set_apart(policy: nn.Module, on_host: bool) -> dict[str, torch.Tensor]:
    """Leaves the parameters of policy.model that are trained in bf16. Returns what they were, by name, sharded alike. To be
    called before the first forward pass, and before the optimizer is made."""
    trained = {name: parameter for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    pinned = PinnedBlocks()
    masters = {name: _to_host(parameter, pinned) if on_host else parameter.data for name, parameter in trained.items()}
    if isinstance(policy, FSDPModule):
        kept = {parameter for name, parameter in trained.items() if dtype_of(name, torch.bfloat16) != torch.bfloat16}
        rounds = lambda tensor: tensor.requires_grad and tensor not in kept  # noqa: E731
        policy._apply(lambda tensor: tensor.bfloat16() if rounds(tensor) else tensor)  # it keeps its own record of them
        policy._get_fsdp_state()._lazy_init()
        for module in policy.modules():
            if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
                group._orig_dtype = None  # FSDP would round reduced gradients to the parameters' precision
    else:
        keep_in_bf16(trained.items())
        for parameter in trained.values():
            parameter.register_post_accumulate_grad_hook(_to_fp32)
    for parameter in policy.parameters():
        parameter.grad_dtype = None  # any: it comes in --grad-dtype
    return masters


def keep_in_bf16(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Rounds parameters that FSDP knows nothing of."""
    for name, parameter in named:
        parameter.data = parameter.data.to(dtype_of(name, torch.bfloat16))


def _to_host(parameter: nn.Parameter, pinned: PinnedBlocks) -> torch.Tensor:
    master = zeros_on_host(parameter.data, parameter.dtype, pinned)
    local(master).copy_(local(parameter))
    return master


def _to_fp32(parameter: nn.Parameter) -> None:
    """Of the first micro-batch; the gradients of later ones are added to what is kept."""
    parameter.grad = parameter.grad.float()


@torch.no_grad()
def take_masters(parameters: dict[str, nn.Parameter], masters: dict[str, torch.Tensor]) -> None:
    """Gives the parameters the values of their masters, which a checkpoint was read into."""
    for name, master in masters.items():
        local(parameters[name]).copy_(local(master))

"""The fp32 weights that training changes, in host memory: the device holds them in bf16, as they are computed with.

A sum over many small steps needs fp32, but the forward and the backward pass see each weight rounded to bf16. So the device
keeps just that, and the optimizer brings the fp32 weights there a piece at a time, with their moments. Weights, gradients and
metrics are those of fp32 weights on the device, bit for bit. Left out: weights that are not trained; they stay in fp32 there.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rl.device import is_accelerator


@torch.no_grad()
def move_masters(policy: nn.Module) -> dict[str, torch.Tensor]:
    """Leaves the sharded parameters of policy.model that are trained in bf16. Returns what they were, by name, sharded alike,
    in host memory. Before the first forward pass, and before the optimizer is made."""
    masters = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            pinned = is_accelerator(parameter.device)
            masters[name] = torch.zeros_like(parameter.data, device="cpu", pin_memory=pinned)
            masters[name].to_local().copy_(parameter.to_local())
    policy._apply(lambda tensor: tensor.bfloat16() if tensor.requires_grad else tensor)  # of FSDP, which keeps its own record
    for parameter in policy.parameters():
        parameter.grad_dtype = None  # any: it comes in --grad-dtype
    policy._get_fsdp_state()._lazy_init()
    for module in policy.modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group):
            group._orig_dtype = None  # FSDP would round reduced gradients to the parameters' precision
    return masters


@torch.no_grad()
def take_masters(parameters: dict[str, nn.Parameter], masters: dict[str, torch.Tensor]) -> None:
    """Gives the parameters the values of their masters, which a checkpoint was read into."""
    for name, master in masters.items():
        parameters[name].to_local().copy_(master.to_local())

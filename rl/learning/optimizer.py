"""The optimizer and its schedule: AdamW, its learning rate, the precision and place of its moments and of gradients."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rl.learning.compact_adamw import CompactAdamW
from rl.ranges import MayChange, Range


@dataclass
class OptimizerArgs:
    """The optimizer."""

    lr: Annotated[float, Range(above=0, at_most=1)] = 1e-4
    """Peak learning rate of AdamW. The default suits the demo; billions of parameters want 1e-6."""
    lr_warmup_steps: Annotated[int, Range(at_least=0)] = 10
    """Training steps over which the rate rises linearly to --lr: of W steps the first trains with --lr / W, the last with --lr.
    All optimizer steps of a training step have the same rate."""
    lr_scheduler_type: Literal["constant", "cosine"] = "cosine"
    """Learning rate after the warm-up: constant, or falling along a cosine to --min-lr-ratio times --lr."""
    min_lr_ratio: Annotated[float, Range(at_least=0, at_most=1)] = 0.0
    """Last learning rate of the cosine, as a fraction of --lr."""
    weight_decay: Annotated[float, Range(at_least=0)] = 0.01
    """AdamW's decoupled weight decay."""
    adam_beta1: Annotated[float, Range(at_least=0, below=1)] = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Annotated[float, Range(at_least=0, below=1)] = 0.999
    """AdamW's decay of the second moment."""
    grad_clip: Annotated[float, Range(above=0)] = 1.0
    """Largest global norm of the gradient; a larger one is scaled down to it."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw keeps two fp32 moments of each parameter, 8 bytes; adamw_8bit keeps them in 8 bits, 2 bytes."""
    optimizer_offload: MayChange[bool] = False
    """Keep the moments in host memory, and with --dtype bfloat16 also the fp32 weights. Each optimizer step moves them to the
    device, one piece at a time."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are reduced over the learners, summed over micro-batches, and kept."""


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], args: OptimizerArgs, masters: dict[torch.nn.Parameter, torch.Tensor]
) -> torch.optim.Optimizer:
    """Return AdamW: torch's own, or piece by piece if it must take less of the device. masters: see rl/learning/masters.py."""
    parameters = list(parameters)
    knobs = {"lr": args.lr, "betas": (args.adam_beta1, args.adam_beta2), "weight_decay": args.weight_decay}
    if args.grad_dtype == "bfloat16":
        for parameter in parameters:
            parameter.grad_dtype = None  # any
            parameter.register_post_accumulate_grad_hook(_to_bf16)
    elif args.optim == "adamw" and not args.optimizer_offload and not masters:
        return torch.optim.AdamW(parameters, **knobs, fused=True)
    in_8_bits = args.optim == "adamw_8bit"
    return CompactAdamW(parameters, **knobs, on_host=args.optimizer_offload, in_8_bits=in_8_bits, masters=masters)


def _to_bf16(parameter: torch.nn.Parameter) -> None:
    """Cast a layer's gradient when it is ready: FSDP makes it in fp32, and adds later ones to the kept one."""
    parameter.grad = parameter.grad.to(torch.bfloat16)


def moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the parameter's sharded moments by name: zeros before its first step."""
    state = optimizer.state[parameter]
    if isinstance(optimizer, CompactAdamW):
        optimizer.begin(parameter)
    elif not state:
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter.data) for _ in range(2))
    return {name: tensor for name, tensor in state.items() if name != "step"}


def lr_factor(step: int, total_steps: int, args: OptimizerArgs) -> float:
    """Return the factor of --lr in training step `step`, from 0: a linear warm-up from 1 / lr_warmup_steps to 1, then constant
    or a cosine down to min_lr_ratio at total_steps. verl's warm-up is one step behind: its first step has the rate 0."""
    if step < args.lr_warmup_steps:
        return (step + 1) / args.lr_warmup_steps
    if args.lr_scheduler_type == "constant":
        return 1.0
    done = min(1.0, (step - args.lr_warmup_steps) / max(1, total_steps - args.lr_warmup_steps))
    cosine = 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * done))))
    return args.min_lr_ratio + (1 - args.min_lr_ratio) * cosine

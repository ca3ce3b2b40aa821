"""The optimizer and its schedule: AdamW, its learning rate, its moments."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

from rl.ranges import Range


@dataclass
class OptimizerArgs:
    """The optimizer."""

    lr: Annotated[float, Range(above=0, at_most=1)] = 1e-4
    """Peak learning rate of AdamW. The default suits the demo; billions of parameters want 1e-6."""
    lr_warmup_steps: Annotated[int, Range(at_least=0)] = 10
    """Training steps over which the rate rises linearly to --lr. All optimizer steps of a training step have one rate."""
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


def make_optimizer(parameters: Iterable[torch.nn.Parameter], args: OptimizerArgs) -> torch.optim.Optimizer:
    """AdamW, in torch's own fused form."""
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(parameters, lr=args.lr, betas=betas, weight_decay=args.weight_decay, fused=True)


def moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """The parameter's sharded moments, by name. Zeros are made for a parameter that has taken no step yet."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter.data) for _ in range(2))
    return {name: tensor for name, tensor in state.items() if name != "step"}


def make_schedule(optimizer: torch.optim.Optimizer, args: OptimizerArgs, total_steps: int, updates_per_step: int) -> LambdaLR:
    """The learning rate over the run. As in verl it is one for all optimizer steps of a training step."""
    return LambdaLR(optimizer, lambda update: lr_factor(update // updates_per_step, total_steps, args))


def restore_schedule(schedule: LambdaLR, updates: int) -> None:
    """Brings the schedule and its optimizer to where they were after so many optimizer steps."""
    lr = schedule.base_lrs[0] * schedule.lr_lambdas[0](updates)
    schedule.load_state_dict({"last_epoch": updates, "_last_lr": [lr], "lr_lambdas": [None]})
    schedule.optimizer.param_groups[0]["lr"] = lr


def lr_factor(step: int, total_steps: int, args: OptimizerArgs) -> float:
    """Linear warm-up to 1 over lr_warmup_steps, then constant or a cosine down to min_lr_ratio at total_steps."""
    if step < args.lr_warmup_steps:
        return (step + 1) / args.lr_warmup_steps
    if args.lr_scheduler_type == "constant":
        return 1.0
    done = min(1.0, (step - args.lr_warmup_steps) / max(1, total_steps - args.lr_warmup_steps))
    cosine = 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * done))))
    return args.min_lr_ratio + (1 - args.min_lr_ratio) * cosine

"""The optimizer, AdamW, and the schedule of its learning rate."""

from collections.abc import Iterable

import torch

from rl.learning.args import OptimizerArgs


def make_optimizer(parameters: Iterable[torch.nn.Parameter], args: OptimizerArgs) -> torch.optim.Optimizer:
    """Return AdamW: torch's own, or one whose moments take less of the device."""
    knobs = {"lr": args.lr, "betas": (0.9, args.adam_beta2), "weight_decay": args.weight_decay}
    if args.optim == "adamw" and not args.optimizer_offload:
        return torch.optim.AdamW(parameters, **knobs, fused=True)
    from rl.learning.compact_adamw import CompactAdamW

    return CompactAdamW(parameters, on_host=args.optimizer_offload, in_8_bits=args.optim == "adamw_8bit", **knobs)


def moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Return the parameter's sharded moments by name: zeros before its first step."""
    state = optimizer.state[parameter]
    if not isinstance(optimizer, torch.optim.AdamW):
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

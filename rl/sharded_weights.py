"""The whole weights on the first learner, and each learner's own part of them."""

import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl import watchdog
from rl.dist import Ranks


@torch.no_grad()
@watchdog.doing("the first learner to send the weights")
def spread(whole: dict[str, torch.Tensor], model: nn.Module, ranks: Ranks) -> None:
    """Copies into every rank's part of the model's parameters, which are DTensors in fp32, what `whole` holds on the first rank
    in any precision, and empties it. A rank holds one whole parameter at a time in fp32. A collective."""
    for name, parameter in model.named_parameters():
        if ranks.is_main:
            tensor = whole.pop(name).to(ranks.device, torch.float32)
        else:
            tensor = torch.empty(parameter.shape, dtype=torch.float32, device=ranks.device)
        if ranks.world_size > 1:
            torch.distributed.broadcast(tensor, src=0)
        shape, begin = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        own = tensor[tuple(slice(start, start + size) for start, size in zip(begin, shape, strict=True))]
        parameter.to_local().copy_(own)
        watchdog.progress()
    whole.clear()

"""Rows that ranks trade with each other, with a gradient."""

import torch
import torch.distributed as dist


class AllToAll(torch.autograd.Function):
    """(x [R, ...], rows to send to each rank of the group, rows to receive from each, group) -> [R', ...] in rank order. The
    gradient is sent back the same way."""

    @staticmethod
    def forward(ctx, x, sent: list[int], received: list[int], group: dist.ProcessGroup):
        ctx.rows = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received, group = ctx.rows
        return AllToAll.apply(grad, received, sent, group), None, None, None

"""All experts of a layer as grouped products on an NPU, since torch-npu computes torch's grouped products one after another.

`torch_npu.npu_grouped_matmul` multiplies the rows of each expert with its matrix in one kernel; both gradients here use it,
too. Before it is used it is compared with products one after another; if they differ, experts are computed one by one. Experts
with biases, without a gate, or in a layout other than [experts, out, in] are left to their model's own forward.
"""

import warnings
from functools import cache

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from rl.model.kernel_check import differences, why_not
from rl.ranks import device
from rl.ranks.device import is_accelerator

NAME = "grouped_mm"  # transformers takes known names only


def experts_implementation() -> str:
    """The way in which transformers computes a layer's experts on a device of LOOPED_EXPERTS."""
    return NAME if use(device.kind()) else "eager"


class GroupedProduct(torch.autograd.Function):
    """(x [S, in] sorted by expert, weight [E, out, in], rows of each expert [E]) -> [S, out]"""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, rows)
        return _product(x, weight.transpose(1, 2), rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, rows = ctx.saved_tensors
        of_x = of_weight = None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            of_x = _product(grad, weight, rows)
        if ctx.needs_input_grad[1]:  # [E, out, in]; some kernels leave an expert without rows unwritten
            of_weight = _product(grad.t(), x, rows, by_rows=True)
            of_weight = torch.where((rows > 0)[:, None, None], of_weight, 0.0)
        return of_x, of_weight, None


def _product(x: Tensor, weight: Tensor, rows: Tensor, by_rows: bool = False) -> Tensor:
    """x [S, a], weight [E, a, b] -> [S, b]. by_rows: x [a, S], weight [S, b] -> [E, a, b], a sum over each expert's rows."""
    how = {"group_list": rows, "group_list_type": 1, "split_item": 3, "group_type": 2 if by_rows else 0}  # 1: numbers, not ends
    return torch.ops.npu.npu_grouped_matmul([x], [weight], **how)[0]


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of transformers' experts modules: hidden_states [T, d], top_k_index and top_k_weights [T, K] -> [T, d]."""
    if not is_accelerator(hidden_states.device):  # the checks at the start
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    if self.has_bias or self.is_transposed or not self.has_gate:
        return type(self).forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)
    chosen = top_k_index.reshape(-1)  # [T * K]
    order = chosen.argsort(stable=True)
    rows = torch.zeros(self.num_experts, dtype=torch.long, device=chosen.device)
    rows = rows.scatter_add_(0, chosen, torch.ones_like(chosen))  # [E]
    x = hidden_states[order // top_k_index.shape[1]]
    gated = self._apply_gate(GroupedProduct.apply(x, self.gate_up_proj, rows))  # some models have a gate of their own
    out = GroupedProduct.apply(gated, self.down_proj, rows)
    weighted = (out * top_k_weights.reshape(-1)[order, None])[order.argsort()]
    return weighted.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


@cache
def use(device: torch.device | str) -> bool:
    """Has transformers compute experts by the kernel if it exists and is right; otherwise a warning gives the reason."""
    if reason := why_not(compared, device):
        warnings.warn(
            f"npu_grouped_matmul is not used ({reason}): experts are computed one after another, slower.", stacklevel=2
        )
        return False
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return True


def compared(device: torch.device | str) -> dict[str, float]:
    """The product's differences from a loop over the experts, one of which has no row."""
    device = torch.device(device)  # which refuses an npu without torch-npu
    generator = torch.Generator().manual_seed(0)
    rows = [5, 0, 11, 16]
    x, weight = (torch.randn(size, generator=generator).bfloat16().to(device) for size in ((32, 64), (4, 96, 64)))

    def kernel(x, weight):
        return (GroupedProduct.apply(x, weight, torch.tensor(rows, device=device)),)

    def plain(x, weight):
        return (torch.cat([part @ of_expert.t() for part, of_expert in zip(x.split(rows), weight, strict=True)]),)

    return differences(kernel, plain, ["products"], rows=x, weights=weight)

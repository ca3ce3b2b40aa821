"""Gated delta nets (arXiv 2412.06464) of Qwen3-Next and Qwen3.5: which layers are known here, and their forward pass.

transformers' forward of such a layer knows one sequence a row: on a packed row its convolution and its recurrent state would
run from one sequence into the next. Here a layer projects the row token by token with transformers' own modules, and the row's
`layout.chain` computes the parts that look back: a convolution over K tokens, and a state [Dk, Dv] of each head. chain.py does
this for the learner's packed rows, rl/model/hybrid/states.py for the engine.

Left out: other linear attention (Mamba, Kimi, MiniMax, LFM2), which is refused by the class of its layers.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.errors import UserError
from rl.model.attention import REMEDY, linear_layers
from rl.model.hybrid.rule import wide
from rl.ranks.device import has_accelerator

LAYERS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet")  # transformers' classes
KERNELS = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")  # its functions that a package of kernels may replace


def delta_nets(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """(decoder layer, its delta net) for each known delta net."""
    found = [(layer, getattr(layer, "linear_attn", None)) for layer in model.modules()]
    theirs = "transformers.models."
    return [of for of in found if type(of[1]).__name__ in LAYERS and type(of[1]).__module__.startswith(theirs)]


def check_layers(model: nn.Module, where: str) -> None:
    """Raises UserError unless all layers that config.json calls linear attention are known delta nets."""
    if len(delta_nets(model)) != len(linear_layers(model.config)):
        raise UserError(
            f"{where}: layers of type linear_attention are not supported unless they are gated delta nets of Qwen3.5 or "
            f"Qwen3-Next, and {type(model).__name__} has others. {REMEDY}"
        )


def check_flags(config, args, engine) -> None:
    """Raises UserError for flags that do not work with the model's delta nets. args: the script's. engine: EngineArgs; None if
    no engine has the model, such as a teacher's."""
    size = args.learner.sequence_parallel
    heads = config.linear_num_value_heads
    of_all = channels(config)
    if args.learner.compile:
        raise UserError("--compile is not for models with gated delta nets. Leave it out.")
    if heads % size or of_all % size:
        nets = f"the gated delta nets' {heads} heads and {of_all} channels"
        raise UserError(f"--sequence-parallel {size}: its ranks divide {nets}. Take a divisor of both.")
    if engine and engine.engine == "vllm" and not has_accelerator():
        sizes = {config.linear_key_head_dim, config.linear_value_head_dim}
        if engine.weights_dtype(args.learner.dtype) != torch.bfloat16 or sizes != {128}:
            raise UserError(
                "--engine vllm: on a CPU its kernels compute gated delta nets in bfloat16 alone, with heads of 128. Add "
                "--rollout-dtype bfloat16 if the model has such heads, or take --engine embedded."
            )


def carry_states(model: nn.Module) -> None:
    """Has the model's delta nets compute through the layout if the model's forward is given one."""
    for layer, net in delta_nets(model):
        net.layout = None
        layer.register_forward_pre_hook(functools.partial(_keep_layout, net), with_kwargs=True)
        net.forward = functools.partial(_forward, net, net.forward)


def _keep_layout(net: nn.Module, layer: nn.Module, args: tuple, kwargs: dict) -> None:
    """transformers before 5.6 hands the net none."""
    net.layout = kwargs.get("layout")


def _forward(net: nn.Module, plain: Callable[..., Tensor], hidden_states: Tensor, **others) -> Tensor:
    """hidden_states [1, T, hidden] -> [1, T, hidden]"""
    if net.layout is None:
        return plain(hidden_states, **others)
    chain = net.layout.chain
    qkv, z, b, a = _projected(net, hidden_states)
    qkv = F.silu(chain.convolved(net.layer_idx, qkv, net.conv1d.weight.squeeze(1)))  # [T, C]
    q, k, v = qkv.split([net.key_dim, net.key_dim, net.value_dim], 1)
    q, k, v = (x.unflatten(1, (-1, size)) for x, size in ((q, net.head_k_dim), (k, net.head_k_dim), (v, net.head_v_dim)))
    if (groups := net.num_v_heads // net.num_k_heads) > 1:
        q = q.repeat_interleave(groups, 1)
        k = k.repeat_interleave(groups, 1)
    decay = -wide(net.A_log).exp() * F.softplus(wide(a) + net.dt_bias)
    out = chain.recurred(net.layer_idx, q, k, v, decay, b.sigmoid())  # [T, H, Dv]
    out = net.norm(out.flatten(0, 1), z.flatten(0, 1)).view(1, hidden_states.shape[1], -1)
    return net.out_proj(out)


def _projected(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [1, T, hidden] -> queries, keys and values [T, C], gate z [T, H, Dv], b [T, H], a [T, H]."""
    if hasattr(net, "in_proj_qkv"):
        z = net.in_proj_z(x)[0].unflatten(1, (-1, net.head_v_dim))
        return net.in_proj_qkv(x)[0], z, net.in_proj_b(x)[0], net.in_proj_a(x)[0]
    q, k, v, z, b, a = net.fix_query_key_value_ordering(net.in_proj_qkvz(x), net.in_proj_ba(x))
    return torch.cat([part.flatten(2)[0] for part in (q, k, v)], 1), z[0], b[0], a[0]


def channels(config) -> int:
    """The channels of the convolution: queries, keys and values."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim


def flops_per_token(config) -> int:
    """FLOP of forward and backward per token of one net: 6 per weight, and 15 per element of the states, as in verl."""
    heads, dk, dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    weights = config.hidden_size * (channels(config) + 2 * heads * dv + 2 * heads)
    return 6 * (weights + channels(config) * config.linear_conv_kernel_dim) + 15 * heads * dk * dv


@contextlib.contextmanager
def in_plain_torch(model: nn.Module) -> Iterator[None]:
    """Has transformers compute delta nets in torch: flash-linear-attention, which it may have imported, needs a device."""
    spaces = [vars(sys.modules[name]) for name in {type(net).__module__ for _, net in delta_nets(model)}]
    kept = [(space, name, space[name]) for space in spaces for name in KERNELS if name in space]
    try:
        for space, name, function in kept:
            space[name] = inspect.unwrap(function)
        yield
    finally:
        for space, name, function in kept:
            space[name] = function

"""Measurements of single operations, without a model, which measure.py starts, and the profile of any call.

- facts: versions, the rate of products in bf16, the rate of copies.
- sdpa: decoding's attention, whose keys grow by one a step. TORCH_CUDNN_SDPA_DEPRIORITIZED=0 lets cuDNN go first.
- packing: attention over a packed row with shared prompts, by the device's kernel and in padded buckets.
- delta: a hybrid model's rule over packed rows, in plain torch and by flash-linear-attention.
- experts: transformers' grouped products, and its loop over experts.
The last three go forward and backward, and compare values and gradients.
"""

import argparse
import collections
import contextlib
import importlib.metadata
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from common import ROOT
from torch import Tensor
from torch.profiler import ProfilerActivity

from rl.model import attention
from rl.model.hybrid import chain
from rl.model.hybrid import rule as delta_rule
from rl.ranks import device
from rl.ranks.dist import Ranks

PACKAGES = ("torch", "transformers", "vllm", "triton", "numpy", "datasets", "fla-core", "liger-kernel")
BF16 = torch.bfloat16
WAITS = ("Synchronize", "_local_scalar_dense", "aten::item", "aten::nonzero")
ATTENTION = ("flash", "fmha", "sdpa")


def timed(act: Callable, repeats: int = 5, warm: int = 2, make: Callable | None = None) -> list[float]:
    """Return the seconds of calls on the device, without those that warm it up. make: makes act's argument, in no time."""
    seconds = []
    for _ in range(warm + repeats):
        given = [make()] if make else []
        device.synchronize()
        started = time.perf_counter()
        act(*given)
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[warm:]


def median(act: Callable) -> float:
    return float(np.median(timed(act)))


def with_gradients(act: Callable[..., Tensor], made: list[Tensor]) -> list[Tensor]:
    """Return act's result, and the gradients of its arguments."""
    leaves = [x.detach().clone().requires_grad_() for x in made]
    out = act(*leaves)
    out.float().square().mean().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def off(found: list[Tensor], right: list[Tensor]) -> list[float]:
    """Return the relative difference of each tensor."""
    pairs = zip(found, right, strict=True)
    return [round(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-9)), 5) for a, b in pairs]


def facts(args: argparse.Namespace, ranks: Ranks) -> dict:
    out = {"python": sys.version.split()[0], "device": device.name(), "cpus": os.cpu_count()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            out[name] = importlib.metadata.version(name)
    if device.kind() == "cuda":
        out |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "nccl": str(torch.cuda.nccl.version())}
        out["total_gb"] = torch.cuda.mem_get_info()[1] / 2**30
    n = 256 if args.toy else 8192
    a, b = (torch.randn(n, n, device=ranks.device, dtype=BF16) for _ in range(2))
    out["matmul_tflops"] = 2 * n**3 / median(lambda: a @ b) / 1e12
    big = torch.randn(2**16 if args.toy else 2**30, device=ranks.device, dtype=BF16)
    return out | {"copy_tb_s": 2 * big.nbytes / median(big.clone) / 1e12}


def sdpa(args: argparse.Namespace, ranks: Ranks) -> dict:
    rows, length = (4, 64) if args.toy else (128, 1024)
    q = torch.randn(rows, 2, 7, 64, device=ranks.device, dtype=BF16)
    k, v = torch.randn(2, rows, 2, length, 64, device=ranks.device, dtype=BF16)

    def run(first: int) -> None:
        for n in range(first, first + 20):
            mask = torch.zeros(rows, 1, 1, n, device=ranks.device, dtype=BF16)
            F.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], attn_mask=mask)

    run(length // 4)
    (seconds,) = timed(lambda: run(length // 2), 1, 0)  # of lengths that are new, as in decoding
    return {"ms_a_call": seconds / 20 * 1e3, "deprioritized": os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED")}


def packing(args: argparse.Namespace, ranks: Ranks) -> dict:
    heads, kv, size = (4, 2, 16) if args.toy else (14, 2, 64)
    lengths, after = ([8, 8, 8], [-1, 0, 0]) if args.toy else ([512] + [768] * 8, [-1] + [0] * 8)
    made = [torch.randn(sum(lengths), n, size, device=ranks.device, dtype=BF16) for n in (heads, kv, kv)]
    out = {"kernel": device.packed_attention(made[0], len(lengths))}

    def run() -> list[Tensor]:
        row = attention.Packed(lengths, ranks.device, after)
        return with_gradients(lambda *x: row.attend(0, *x, size**-0.5), made)

    def measure(name: str) -> list[Tensor]:
        out[f"{name}_seconds"] = median(run)
        counted(name, run, out)
        return run()

    found = measure("kernel")
    with mock.patch.object(attention, "packed_attention", lambda *_: None):
        return out | {"off": off(found, measure("buckets"))}


def delta(args: argparse.Namespace, ranks: Ranks) -> dict:
    heads, size, lengths = (2, 16, [40, 20, 30]) if args.toy else (16, 128, [512] * 16)
    after = [-1, 0, 0] if args.toy else [-1] + [0] * 8 + [-1] + [9] * 6
    rule, why = delta_rule._checked(ranks.device, BF16, size, size)
    tokens = sum(lengths)
    made = [torch.randn(tokens, heads, size, device=ranks.device, dtype=BF16) for _ in range(3)]
    made.append(-0.1 * torch.rand(tokens, heads, device=ranks.device))
    made.append(torch.rand(tokens, heads, device=ranks.device, dtype=BF16))
    out = {"tokens": tokens, "fla": why or ("used" if rule else "none on a CPU")}

    def run() -> list[Tensor]:
        return with_gradients(lambda *x: chain.Chain(lengths, after, ranks.device).recurred(0, *x), made)

    def measure(name: str) -> list[Tensor]:
        out[f"{name}_seconds"] = median(run)
        out[f"{name}_memory"] = device.memory_gb()
        return run()

    with mock.patch.object(chain, "packed_rule", lambda *_: None):
        right = measure("plain")
    return out | ({"off": off(measure("fla"), right)} if rule else {})


def experts(args: argparse.Namespace, ranks: Ranks) -> dict:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hidden, width, count, tokens = (64, 32, 8, 64) if args.toy else (2048, 768, 128, 8192)
    sizes = dict(hidden_size=hidden, moe_intermediate_size=width, num_experts=count, num_experts_per_tok=min(8, count // 2))
    sizes |= dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=128)
    x = torch.randn(1, tokens, hidden, device=ranks.device, dtype=BF16)
    out = {"tokens": tokens}
    found = []
    for way in ("grouped_mm", "eager"):
        torch.manual_seed(0)
        how = {"dtype": BF16, "experts_implementation": way}
        with torch.device(ranks.device):
            layer = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**sizes), **how).model.layers[0].mlp

        def run(layer=layer) -> list[Tensor]:
            layer.zero_grad()
            values = with_gradients(lambda x: y[0] if isinstance(y := layer(x), tuple) else y, [x])
            return [*values, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]

        found.append(run())
        out[f"{way}_seconds"] = median(run)
        out[f"{way}_memory"] = device.memory_gb()
    return out | {"off": off(*found)}


OPERATIONS = (facts, sdpa, packing, delta, experts)


# ------------------------------------------------------------------------------------------------------------------- profiles


def profiled(name: str, act: Callable, warm: int, out: dict) -> str:
    """Return tables of a call's longest operations. Add numbers to `out`: the seconds of a call before, its peak memory, and
    what the profiler counts. act: is called `warm` + 3 times."""
    for _ in range(warm):
        act()
    device.synchronize()
    device.memory_gb()
    started = time.perf_counter()
    act()
    device.synchronize()
    out[f"{name}, seconds"] = time.perf_counter() - started
    out[f"{name}, memory"] = device.memory_gb()
    text = counted(name, act, out)
    out[f"{name}, waits at"] = waiting_lines(act)
    return text


def counted(name: str, act: Callable, out: dict) -> str:
    """Return tables of a call's 25 longest kernels and operations. Add counts to `out`."""
    on_gpu = device.kind() == "cuda"
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        act()
        device.synchronize()
    events = found.key_averages()
    counts = {event.key: event.count for event in events}
    out[f"{name}, waits"] = {key: count for key, count in counts.items() if any(word in key for word in WAITS)}
    out[f"{name}, copies"] = {key: count for key, count in counts.items() if key.startswith(("Memcpy", "cudaMemcpyAsync"))}
    out[f"{name}, launches"] = sum(count for key, count in counts.items() if "LaunchKernel" in key)
    out[f"{name}, attention"] = sorted({key[:90] for key in counts if any(word in key.lower() for word in ATTENTION)})[:8]
    # Kernels alone: the rows of operators and of named ranges would count their kernels once more.
    kernels = [event for event in events if "CUDA" in str(event.device_type) and not event.is_user_annotation]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e3
    out[f"{name}, device seconds"] = busy / 1e3
    lines = [f"== {name}", f"{'kernel':80.80} {'calls':>7} {'ms':>9} {'share':>6}"]
    for event in kernels[:25]:
        ms = event.self_device_time_total / 1e3
        lines.append(f"{event.key:80.80} {event.count:7d} {ms:9.2f} {ms / busy if busy else 0:6.1%}")
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return "\n".join([*lines, "", events.table(sort_by=key, row_limit=25, max_name_column_width=60)])


def waiting_lines(act: Callable) -> dict[str, int]:
    """Return the source lines at which the host waits for a GPU during a call, with counts."""
    if device.kind() != "cuda":
        act()
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    where = collections.Counter()
    for warning in caught:
        if "synchroniz" in str(warning.message):
            file = Path(warning.filename)
            short = file.relative_to(ROOT) if file.is_relative_to(ROOT) else Path(*file.parts[-3:])
            where[f"{short}:{warning.lineno}"] += 1
    return dict(where.most_common(30))

"""The optimizer's memory flags change only where moments are stored, and in which precision; and what a learner alone does
without FSDP is what it does with it."""

import numpy as np
import pytest
import torch
from helpers import make_group
from torch.distributed.fsdp import FSDPModule

from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.compact_adamw import CompactAdamW
from rl.learning.learner import Learner
from rl.ranges import check
from rl.ranks.shards import local


def make_learner(model: str, ranks, **flags) -> Learner:
    args = LearnerArgs(lr=1e-2, lr_warmup_steps=0, lr_scheduler_type="constant", **flags)
    check(args)
    return Learner(model, args, ranks, 100)


def update(learner: Learner, seed: int) -> dict[str, float]:
    """Take an optimizer step with the gradient of two or more micro-batches."""
    rng = np.random.default_rng(seed)
    batch = Batch.of([make_group(t, [3, 9, 5, 7], rng=rng) for t in range(2)])
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), 40, learner.ranks)
    assert len(micros) > 1
    for micro in micros:
        (-learner.forward(micro).log_prob.sum() / len(batch.token)).backward()
    return learner.step()


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in learner.weights()])


OFFLOADED = [(kind, "param_offload", dtype) for kind in ("qwen2-tied", "moe") for dtype in ("float32", "bfloat16")]
OFFLOADED += [("qwen3", "optimizer_offload", "bfloat16")]
OFFLOADED += [pytest.param("qwen3", "optimizer_offload", "float32", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("model", "flag", "dtype"), OFFLOADED)
def test_a_rank_alone_learns_what_it_learns_with_its_memory_on_the_host(models, ranks, model, flag, dtype):
    """Bit for bit, with gradients of several micro-batches. In fp32 without FSDP."""
    flags = {"gradient_checkpointing": True, "dtype": dtype}
    plain, other = (make_learner(models[model], ranks, **flags, **{flag: on}) for on in (False, True))
    parts = [sum(isinstance(module, FSDPModule) for module in of.policy.modules()) for of in (plain, other)]
    every = 1 + len(plain.policy.model.model.layers)
    needed = 0 if dtype == "float32" else every
    assert parts == [needed, every if flag == "param_offload" else needed]
    assert [isinstance(of.optimizer, CompactAdamW) for of in (plain, other)] == [False, flag == "optimizer_offload"]
    assert {p.dtype for p in plain.policy.parameters()} == {torch.float32}
    first = weights(plain).clone()
    for seed in range(3):
        assert update(plain, seed) == update(other, seed)
    assert torch.equal(weights(plain), weights(other)) and not torch.equal(weights(plain), first)
    states = plain.state_tensors(), other.state_tensors()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(local(states[0][name]), local(states[1][name])) for name in states[0])
    assert plain.state() == other.state()


# ------------------------------------------------------------------------------------------------------ CompactAdamW

KNOBS = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01}
SHAPES = [(1, 64), (1, 256), (1, 257), (1, 63), (64, 1), (300, 1), (1, 1), (1,), (70,), (), (0,), (0, 64), (64, 0), (1, 1, 64)]
SHAPES += [(2, 1, 64), (3, 1, 600), (1, 2, 256), (17, 64)]


def parameters(generator: torch.Generator) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_every_shape_is_stepped_and_restored_to_the_bit(on_host, in_8_bits):
    """In fp32 as torch's own AdamW does."""
    generator = torch.Generator().manual_seed(0)
    own = parameters(generator)
    grads = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(3)]
    whole = CompactAdamW(own, on_host=on_host, in_8_bits=in_8_bits, **KNOBS)
    plain = [torch.nn.Parameter(parameter.detach().clone()) for parameter in own]
    theirs = torch.optim.AdamW(plain, **KNOBS)
    for number, of_step in enumerate(grads):
        if number == 2:
            rest = CompactAdamW([torch.nn.Parameter(p.detach().clone()) for p in own], on_host, in_8_bits, **KNOBS)
            for parameter, old in zip(rest.param_groups[0]["params"], own, strict=True):
                for name, tensor in rest.begin(parameter).items():
                    tensor.copy_(whole.state[old][name])
        optimizers = [whole, theirs] + ([rest] if number == 2 else [])
        for optimizer in optimizers:
            for parameter, grad in zip(optimizer.param_groups[0]["params"], of_step, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
    for found, again, expected in zip(own, rest.param_groups[0]["params"], plain, strict=True):
        assert torch.equal(found, again)
        if not in_8_bits:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def nearest(x: np.ndarray, signed: bool) -> np.ndarray:
    """x [C] as 8 bits hold it, from the paper's words: each block of 256 over its largest magnitude, and of 7 decades below 1,
    each cut into twice as many parts as the one below, the middle that is nearest; 0 and 1 besides."""
    known = [0.0, 1.0]
    for exponent in range(-6, 1):
        edges = np.linspace(0.1, 1, 2 ** (exponent + 6 + (not signed)) + 1) * 10.0**exponent
        for middle in (edges[1:] + edges[:-1]) / 2:
            known += [middle, -middle] if signed else [middle]
    assert len(known) == 256
    known, out = np.array(known), np.zeros_like(x)
    for start in range(0, len(x), 256):
        block = x[start : start + 256]
        if largest := abs(block).max():
            distance = abs(block[:, None] / largest - known)
            out[start : start + 256] = known[distance.argmin(1)] * largest
    return out


def adamw_in_8_bits(value: np.ndarray, grads: list[np.ndarray]) -> np.ndarray:
    """value [R, C] after a step with each gradient, in double precision, row by row."""
    (b1, b2), lr = KNOBS["betas"], KNOBS["lr"]
    first, root = np.zeros_like(value), np.zeros_like(value)  # as they are kept
    for t, grad in enumerate(grads, start=1):
        m = b1 * first + (1 - b1) * grad
        v = b2 * root**2 + (1 - b2) * grad**2
        step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
        value = value * (1 - lr * KNOBS["weight_decay"]) - lr * step
        first = np.stack([nearest(row, True) for row in m])
        root = np.stack([nearest(row, False) for row in np.sqrt(v)])
    return value


@pytest.mark.parametrize("shape", [(3, 256), (5, 600), (7, 65)])
def test_8_bits_are_those_of_the_paper(shape, monkeypatch):
    """Gradients over seven decades; pieces of 16 rows, of which the second is not full."""
    monkeypatch.setattr("rl.learning.compact_adamw.PIECE", 1)
    rng = np.random.default_rng(0)
    shape = (shape[0] + 16, shape[1])
    start = rng.standard_normal(shape)
    grads = [rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 1, shape) for _ in range(4)]
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = CompactAdamW([parameter], on_host=True, in_8_bits=True, **KNOBS)
    for grad in grads:
        parameter.grad = torch.tensor(grad, dtype=torch.float32)
        optimizer.step()
    off = abs(parameter.detach().numpy() - adamw_in_8_bits(start, grads)) > 1e-4
    assert off.mean() < 1e-3  # where a rounding to fp32 has chosen the neighbour of the nearest
    state = optimizer.state[parameter]
    sizes = [sum(tensor.nbytes for tensor in state.values()), 2 * parameter.nbytes]
    assert state["exp_avg"].dtype == torch.uint8 and sizes[0] < 0.35 * sizes[1]

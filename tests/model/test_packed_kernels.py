"""Attention kernels of the devices on packed rows: exact, with fake kernels in double precision, and bounded in memory."""

import functools

import helpers
import packed_kernels as kernels
import pytest
import torch
from helpers import flat_gradient, packed_learner
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config

from rl.errors import UserError
from rl.model import attention_kernels
from rl.model.attention import Packed
from rl.model.attention_kernels import check_kernel
from rl.ranks.device import PACKED_ATTENTION, packed_attention

CPU = torch.device("cpu")
PROMPTS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 30), max_size=4)), min_size=1, max_size=6)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative


@pytest.fixture
def on_cpu():
    """Give the CPU the attention of another device until the test ends."""
    yield kernels.give_to_cpu
    PACKED_ATTENTION.pop("cpu", None)
    kernels.MISALIGNED.clear()


# The gradient of a token that sees only itself is 0 except for rounding. Such gradients are compared with 1e-3.
relative = functools.partial(helpers.relative, least=1e-3)


@settings(max_examples=40)
@given(
    PROMPTS,
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    st.sampled_from([("npu", torch.float32), ("npu", torch.bfloat16), ("cuda", torch.bfloat16), ("cuda", torch.float16)]),
    st.integers(0, 99),
)
def test_a_kernel_sees_what_rectangles_see(prompts, heads, kind, seed):
    """Values and gradients, against rectangles in double precision: those are held against a softmax in test_batch.py."""
    segments, after = [], []
    for prompt, responses in prompts:
        after += [-1, *[len(segments)] * len(responses)]
        segments += [prompt, *responses]
    name, dtype = kind
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(sum(segments), n, 8, generator=generator).to(dtype) for n in (heads[0], heads[1], heads[1], heads[0])]
    *leaves, weight = made
    exact = [x.double().requires_grad_() for x in leaves]
    expected = Packed(segments, after=after).attend(0, *exact, scaling=0.3)
    kernels.give_to_cpu(name)
    try:
        leaves = [x.requires_grad_() for x in leaves]
        before = kernels.CALLS.total()
        found = Packed(segments, after=after).attend(0, *leaves, scaling=0.3)
        assert found.dtype == dtype and found.shape == expected.shape
        gradients = torch.autograd.grad(found, leaves, weight)
        assert kernels.CALLS.total() == before + 2, "forward and backward pass are one call each"
    finally:
        del PACKED_ATTENTION["cpu"]
    assert relative(found, expected) < ROUNDING[dtype]
    for got, want in zip(gradients, torch.autograd.grad(expected, exact, weight.double()), strict=True):
        assert relative(got, want) < ROUNDING[dtype]


@pytest.mark.parametrize(
    ("kind", "dtype", "segments", "size", "kernel"),
    [
        ("npu", torch.float32, 9, 128, "fusion"),
        ("npu", torch.bfloat16, 1000, 128, "fusion"),
        ("npu", torch.float64, 9, 128, None),
        ("npu", torch.bfloat16, 1001, 128, None),
        ("cuda", torch.float16, 5000, 256, "flash"),
        ("cuda", torch.float32, 9, 128, None),
        ("cuda", torch.bfloat16, 9, 320, None),
        ("cuda", torch.bfloat16, 9, 100, None),
        ("cpu", torch.bfloat16, 9, 128, None),
    ],
)
def test_rectangles_only_where_there_is_no_kernel(kind, dtype, segments, size, kernel, on_cpu):
    if kind != "cpu":
        on_cpu(kind)
    assert packed_attention(torch.empty(1, 1, size, dtype=dtype), segments) == kernel


@pytest.mark.parametrize(("kind", "dtype", "within"), [("npu", "float32", 2e-6), ("cuda", "bfloat16", 2e-2)])
def test_a_learner_computes_the_same_with_a_kernel(models, ranks, on_cpu, kind, dtype, within):
    plain, expected = packed_learner(models["qwen3"], ranks, dtype=dtype)
    on_cpu(kind)
    kernel, before = PACKED_ATTENTION[kind][0], kernels.CALLS.copy()
    learner, found = packed_learner(models["qwen3"], ranks, dtype=dtype)
    made = kernels.CALLS - before
    assert made.pop(f"{kernel} backward") == 1 + 2, "the check at the start, and two layers"
    assert made.pop(kernel) == (3 if dtype == "bfloat16" else 3 + 2), "the comparison with transformers is in fp32"
    assert not made
    assert relative(found, expected) < within
    assert relative(flat_gradient(learner.policy), flat_gradient(plain.policy)) < within


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_a_kernel_that_computes_something_else_is_refused_at_the_start(on_cpu, kind, monkeypatch):
    config, dtype = Qwen2Config(num_attention_heads=4, num_key_value_heads=2, hidden_size=64), torch.bfloat16
    check = functools.partial(check_kernel, config, 1, dtype, CPU)
    check()  # no kernel, nothing to check
    on_cpu(kind)
    check()
    kernels.MISALIGNED.add(PACKED_ATTENTION[kind][0])
    with pytest.raises(UserError, match="its values differ from plain torch's by"):
        check()
    kernels.MISALIGNED.clear()
    right = kernels.backward
    monkeypatch.setattr(kernels, "backward", lambda *given: [x * s for x, s in zip(right(*given), (1, 1.1, 1), strict=True)])
    with pytest.raises(UserError, match="its gradients of keys differ"):
        check()


def test_a_device_whose_kernel_refuses_it_is_one_message(on_cpu, monkeypatch):
    """As FlashAttention does on GPUs before compute capability 8.0."""
    on_cpu("cuda")

    def refuses(*_):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nException raised from mha_varlen_fwd")

    monkeypatch.setitem(attention_kernels.KERNELS, "flash", refuses)
    config = Qwen2Config(num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    with pytest.raises(UserError, match=r"in torch.bfloat16 \(FlashAttention only .* newer\.\)\. --dtype float32"):
        check_kernel(config, 1, torch.bfloat16, CPU)

"""flash-linear-attention's gated delta rule: used where it is right, by stand-ins with the signature and the refusals of
fla-core 0.6.0 that compute it token by token."""

import sys
import types

import pytest
import torch
from helpers import DELTA, SMALL
from test_delta_net import differences, in_double, micro_batch, recurrence  # noqa: F401  (a fixture)
from transformers import Qwen3_5TextConfig

from rl.model.hybrid.rule import LENGTHS, PACKAGE, _checked, choose_rule, compared, packed_rule, unused
from rl.model.hybrid.states import FillingChain, States
from rl.model.kernel_check import TOLERANCE
from rl.ranks.device import DELTA_RULE

CPU = torch.device("cpu")
CONFIG = Qwen3_5TextConfig(**SMALL | DELTA)


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    """The stand-in: fewer arguments than the real one's, and its refusals."""
    CALLS.append(len(cu_seqlens) - 1)
    count, wide = len(cu_seqlens) - 1, torch.promote_types(q.dtype, torch.float32)
    if q.shape[0] != 1 or q.shape[2] != k.shape[2] or (initial_state is not None and len(initial_state) != count):
        raise ValueError("refused")
    assert not (torch.is_grad_enabled() and cu_seqlens.is_inference()), "it cannot be saved for the backward pass"
    lengths = cu_seqlens.diff().tolist()
    assert min(lengths) > 0, "an empty sequence breaks the launch"
    assert cu_seqlens.dtype == torch.long
    given = q.dtype
    q, k, v, g, beta = (x[0].to(wide) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * (scale or q.shape[-1] ** -0.5)
    state = q.new_zeros(count, q.shape[1], q.shape[2], v.shape[2]) if initial_state is None else initial_state.to(wide)
    parts = zip(*(x[None].split(lengths, 1) for x in (q, k, v, g, beta)), state.split(1), strict=True)
    outputs, states = zip(*(recurrence(*part) for part in parts), strict=True)
    return torch.cat(outputs, 1).to(given), torch.cat(states) if output_final_state else None


CALLS: list[int] = []  # sequences of each


@pytest.fixture
def on_cpu(monkeypatch):
    """Has the CPU take a rule as an accelerator takes flash-linear-attention's."""

    def give(rule, *precisions) -> None:
        modules = [types.ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule")]
        if rule:
            modules[-1].chunk_gated_delta_rule = rule
            for module in modules:
                monkeypatch.setitem(sys.modules, module.__name__, module)
        else:
            monkeypatch.setitem(sys.modules, "fla", None)  # an ImportError
        monkeypatch.setitem(DELTA_RULE, "cpu", set(precisions) or {torch.bfloat16})
        _checked.cache_clear()
        CALLS.clear()

    yield give
    _checked.cache_clear()


# --------------------------------------------------------------------------------------------------------- the check


def changed(**change):
    """The rule with arguments, by name, or its result changed."""

    def rule(q, k, v, g, beta, **more):
        given = dict(q=q, k=k, v=v, g=g, beta=beta, **more)
        of_result = change.get("result", lambda out, states: (out, states))
        given |= {name: function(given[name]) for name, function in change.items() if name != "result"}
        return of_result(*chunk_gated_delta_rule(**given))

    return rule


def without(name: str):
    """The rule without one of its gradients."""
    return changed(**{name: lambda x: x.detach() + 0 * x})  # 0 * x: its gradient is zeros


def one_sequence(q, *rows, cu_seqlens, initial_state, **more):
    """Runs each sequence into the next."""
    out, states = chunk_gated_delta_rule(q, *rows, cu_seqlens=cu_seqlens[[0, -1]], initial_state=initial_state[:1], **more)
    return out, states.expand_as(initial_state)


def turned(out, states):
    return out, states.transpose(-1, -2)


WRONG = {
    "sequences run into each other": one_sequence,
    "no first states": changed(initial_state=lambda state: 0 * state),
    "one first state for all": changed(initial_state=lambda state: state[:1].expand_as(state)),
    "first states turned": changed(initial_state=lambda state: state.transpose(-1, -2)),
    "final states turned": changed(result=turned),
    "final states in another order": changed(result=lambda out, states: (out, states.flip(0))),
    "final states without gradient": changed(result=lambda out, states: (out, states.detach() + 0 * states)),
    "no norm": changed(use_qk_l2norm_in_kernel=lambda _: False),
    "decay to the base of 2": changed(g=lambda g: g * 0.6931),
    "beta is a logit": changed(beta=torch.sigmoid),
    "NaN": changed(result=lambda out, states: (out * torch.nan, states)),
    "a little off": changed(result=lambda out, states: (out * 1.05, states)),
} | {f"no gradient of {name}": without(name) for name in ("q", "k", "v", "g", "beta", "initial_state")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_right_is_used(dtype, on_cpu):
    on_cpu(chunk_gated_delta_rule, dtype)
    with torch.inference_mode():  # as in an engine's first prefill
        assert unused(CONFIG, dtype, CPU) == ""
    row = torch.zeros(1, 1, 16, dtype=dtype)
    assert packed_rule(row, row) is chunk_gated_delta_rule
    off = compared(chunk_gated_delta_rule, CPU, dtype, 16, 16)
    assert max(off.values()) < TOLERANCE / 3 and len(off) == 2 + 6


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_not_used(fault, on_cpu):
    on_cpu(WRONG[fault])
    assert "differ from plain torch's by" in unused(CONFIG, torch.bfloat16, CPU)
    row = torch.zeros(1, 1, 16, dtype=torch.bfloat16)
    assert packed_rule(row, row) is None


def raises(*_, **__):
    raise RuntimeError("0 active drivers")


@pytest.mark.parametrize(
    ("rule", "dtype", "why"),
    [
        (None, torch.bfloat16, "(pip install fla-core=="),
        (raises, torch.bfloat16, "RuntimeError: 0 active drivers"),
        (lambda q, k, v, g, beta, cu_seqlens: None, torch.bfloat16, "TypeError: "),
        (changed(initial_state=torch.zeros_like), torch.bfloat16, "differentiated Tensor"),
        (chunk_gated_delta_rule, torch.float32, "it is for half precision, and this is torch.float32"),
    ],
)
def test_what_cannot_be_used_is_said(rule, dtype, why, on_cpu, capsys):
    on_cpu(rule)
    assert why in unused(CONFIG, dtype, CPU)
    choose_rule(CONFIG, dtype, CPU, say=False)
    assert not capsys.readouterr().out
    choose_rule(CONFIG, dtype, CPU, say=True)
    said = capsys.readouterr().out
    assert why in said and (rule is None) == (PACKAGE in said) and said.startswith("warning: ") and said.count("\n") == 1


# ------------------------------------------------------------------------------------------------------ packed rows


def test_a_packed_row_by_the_kernel_is_its_sequences(in_double, on_cpu):  # noqa: F811
    """Against transformers on each sequence, as our own rule: values, and each parameter's gradient."""
    on_cpu(chunk_gated_delta_rule, torch.float64)
    log_probs, of_gradients = differences("Qwen3_5TextConfig", *micro_batch({1: 1, 2: 3, 65: 4}, (1, 9), longest=70))
    assert log_probs <= 1e-10 and of_gradients <= 1e-9
    assert [len(LENGTHS), 3, 7] == CALLS, "the check; prompts; responses, of which one is empty"


def test_a_prefill_by_the_kernel_leaves_the_same_states(on_cpu):
    lengths, slots = [5, 70, 1], [2, 0, 3]
    rows = [torch.randn(sum(lengths), 4, 16).bfloat16() for _ in range(3)]
    rows += [-torch.rand(sum(lengths), 4), torch.rand(sum(lengths), 4).bfloat16()]

    def filled() -> tuple[torch.Tensor, torch.Tensor]:
        states = States(CONFIG, 4, torch.bfloat16, CPU)
        return FillingChain(lengths, slots, states).recurred(0, *rows), states.recurrent

    own = filled()
    on_cpu(chunk_gated_delta_rule)
    for found, expected in zip(filled(), own, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert [len(LENGTHS), 3] == CALLS

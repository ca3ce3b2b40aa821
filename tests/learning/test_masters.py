"""Fp32 master weights with bf16 compute weights: bit for bit the results of FSDP's fp32 weights, on any layout."""

import itertools

import pytest
import torch
from layouts import ALONE, learn_on
from test_compact_memory import copy_state, make_learner, update, weights
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from rl.errors import UserError
from rl.model.shards import local

ON_HOST = {"dtype": "bfloat16", "optimizer_offload": True}


@pytest.mark.parametrize("on_host", [True, False])
def test_weights_gradients_and_metrics_are_those_of_fp32_weights(models, ranks, on_host):
    """Which FSDP has where parameters are moved. Routers, tied embeddings and norms among them; gradients of several
    micro-batches are summed in fp32."""
    plain = make_learner(models["moe"], ranks, dtype="bfloat16", param_offload=True)
    other = make_learner(models["moe"], ranks, dtype="bfloat16", optimizer_offload=on_host)
    for seed in range(2):
        assert update(plain, seed) == update(other, seed)
    assert {p.dtype for p in other.parameters.values()} == {torch.bfloat16} != {p.dtype for p in plain.parameters.values()}
    assert all(torch.equal(local(p).bfloat16(), other.parameters[name]) for name, p in plain.parameters.items())
    for dtype in (torch.float32, torch.bfloat16):  # what is published
        pairs = zip(plain.weights(dtype), other.weights(dtype), strict=True)
        assert all(a[0] == b[0] and torch.equal(a[1].to(dtype), b[1].to(dtype)) for a, b in pairs)


def test_a_torch_whose_gradients_would_be_rounded_is_refused(models, ranks, monkeypatch):
    """One whose FSDP does not have the field that turns this off."""
    monkeypatch.setattr(FSDPParamGroup, "_init_mp_dtypes", lambda group: None)
    with pytest.raises(UserError, match="--optimizer-offload: this torch's FSDP would round gradients"):
        make_learner(models["moe"], ranks, grad_dtype="bfloat16", **ON_HOST)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"grad_dtype": "bfloat16"}, {"optim": "adamw_8bit"}])
@pytest.mark.parametrize("flags", itertools.permutations([{"dtype": "bfloat16"}, ON_HOST]))
def test_a_run_resumes_with_or_without_the_flag_bit_for_bit(models, ranks, flags, more):
    whole, half, rest = (make_learner(models["moe"], ranks, **of, **more) for of in (flags[0], *flags))
    for seed in range(3):
        update(whole, seed)
        if seed < 2:
            update(half, seed)
    copy_state(half, rest)
    assert update(rest, 2)["actor/grad_norm"] > 0
    assert torch.equal(weights(rest), weights(whole))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"sequence_parallel": 2}, {"expert_parallel": 2}])
def test_two_learners_compute_the_same_bits(models, layout):
    cases = {"gspo": ({"loss_mode": "gspo", "ppo_mini_batch_size": 1}, [[3, 9, 5], [7, 2, 4]])}
    flags = {"dtype": "bfloat16", **layout, **ALONE}
    layouts = {"plain": [models["moe"], flags], "host": [models["moe"], flags | ON_HOST]}
    found = learn_on(2, layouts, cases)
    plain, host = found["plain/gspo"], found["host/gspo"]
    assert torch.equal(plain["weights"], host["weights"]) and plain["metrics"] == host["metrics"]
    assert all(torch.equal(*both) for both in zip(plain["gradients"], host["gradients"], strict=True))

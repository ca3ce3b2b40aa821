"""losses.py, part four: formulas for stale tokens (VESPO, DRO, DPPO, the KL with a ratio, the off-policy sequence mask), by
hand and against slow loops, and all losses and advantages on batches whose masked tokens are deleted."""

import math

import losses_reference as slow
import pytest
import torch
from hypothesis import given, settings
from test_losses import NAMES as ESTIMATORS
from test_losses import baseline, estimate
from test_losses_policy import COV, F64, LENGTHS, NAMES, SEEDS, call, log, tokens

import losses


def test_vespo_by_hand():
    # a response whose ratios 2 and 1/2 multiply to 1; one of 2 for A > 0 and A < 0, one of 1/2
    args = tokens(log(2, 0.5, 2, 2, 0.5), [3, 3, 1, -1, 1], seq=[0, 0, 1, 2, 3])
    loss, stats = losses.vespo(*args)
    ln2 = math.log(2)
    expected = [-3 * ln2, 3 * ln2, -4 * math.exp(-3) * ln2, 8 * math.exp(-2) * ln2, 0.25 * math.exp(1.5) * ln2]
    assert loss.tolist() == pytest.approx(expected) and stats == {}
    assert losses.vespo(*args, k_pos=1, lam_pos=1)[0][2].item() == pytest.approx(-2 * math.exp(-1) * ln2)


def test_dro_and_luspo_by_hand():
    args = tokens([-1.0, -2.0], [2, -1], old=[-1.5, -2.0])
    loss, _ = losses.dro(*args, beta=0.4)
    assert loss.tolist() == pytest.approx([2 + 0.2 * 0.25, -2])
    # the minimum is where d = A / beta, wherever the sampler is
    lp = torch.tensor([-1.5 + 2 / 0.4], dtype=F64, requires_grad=True)
    best, _ = losses.dro(lp, *(x[:1] for x in args[1:]), beta=0.4)
    assert torch.autograd.grad(best.sum(), lp)[0].item() == pytest.approx(0)
    # two responses, of two tokens and one: gspo counts both alike, luspo by their length
    args = tokens([-1.0, -1, -1], [1, 1, -1], old=[-1.0, -1, -1], seq=[0, 0, 1])

    def total(name):
        loss = losses.POLICY_LOSSES[name]
        return losses.aggregate(loss(*args)[0], *args[3:], loss.aggregation, 2.0).item()

    assert (total("gspo"), total("luspo")) == (0, -0.5)
    losses.check_combination("grpo", "gspo", "seq-mean-token-sum")
    assert losses.luspo(*tokens(log(1.1), [1]))[0].item() == pytest.approx(-1.0025)


def test_dppo_kl_by_hand():
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)  # of 1/2 to 3/4, and to 1/4
    lp, old = log(0.75, 0.25, 0.75, 0.25, 0.2), log(0.5, 0.5, 0.5, 0.5, 0.01)
    args = tokens(lp, [1, -1, -1, 1, 1], old=old)
    loss, stats = losses.dppo_kl(*args, clip_low=kl - 1e-9, clip_high=10, clip_c=10)
    inside = [-1.5 * math.log(0.75), 0.5 * math.log(0.25), 1.5 * math.log(0.75), -0.5 * math.log(0.25), -10 * math.log(0.2)]
    assert loss.tolist() == pytest.approx([inside[0], 0, *inside[2:]])
    assert stats["pg_clipfrac"].tolist() == [0, 1, 0, 0, 0] and stats["pg_clipfrac_lower"].tolist() == [0, 0, 0, 0, 1]
    loss, _ = losses.dppo_kl(*args, clip_low=10, clip_high=kl + 1e-9, clip_c=100)
    assert loss.tolist() == pytest.approx([*inside[:4], 0])  # 0.01 to 0.2 is farther than 1/2 to 3/4


def test_binary_kl_of_certain_tokens_is_finite():
    x = torch.tensor([0.0, -1e-12, -1e-4, -40.0, -300.0])
    far = losses.binary_kl(x[:, None], x[None, :])
    assert torch.isfinite(far).all() and (far >= -1e-6).all() and not far.diagonal().any()
    p, q = (torch.tensor(v).log() for v in (1 - 1e-4, 1 - 2e-4))  # of float32: 1 - p loses no digits
    assert losses.binary_kl(p, q).item() == pytest.approx(slow.binary_kl(*(x.double().exp().item() for x in (p, q))), rel=1e-3)


# ---------------------------------------------------------------------------------------------------- KL with a ratio


@settings(max_examples=25)
@given(LENGTHS, SEEDS)
def test_the_kl_with_a_ratio_equals_slow_loops(lengths, seed):
    """The slow twin multiplies by a ratio that carries a gradient; the code by a detached one."""
    b = slow.random_batch(lengths, seed)
    lp = b["lp"].clone().requires_grad_()
    out = losses.kl_penalty(lp, b["roll"], b["mask"], "k3r", b["old"])
    (gradient,) = torch.autograd.grad(out.sum(), lp)
    step = 1e-6
    for t, (x, ref, old) in enumerate(zip(b["lp"].tolist(), b["roll"].tolist(), b["old"].tolist(), strict=True)):
        m = b["mask"][t]
        assert out[t].item() == pytest.approx(slow.kl("k3r", x, ref, old) if m else 0, abs=1e-9)
        slope = (slow.kl("k3r", x + step, ref, old) - slow.kl("k3r", x - step, ref, old)) / (2 * step)
        assert gradient[t].item() == pytest.approx(slope if m else 0, abs=1e-6)


def test_only_the_kl_with_a_ratio_has_the_gradient_of_the_divergence_on_stale_tokens():
    """Over all outcomes of a small distribution, sampled by an older policy."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=F64, requires_grad=True)
    old = torch.tensor([0.5, -0.2, 0.1, 0.4], dtype=F64).log_softmax(0)
    ref = torch.tensor([0.0, 0.2, 0.1, -0.5], dtype=F64).log_softmax(0)
    log_p, mask = logits.log_softmax(0), torch.ones(4, dtype=torch.bool)
    exact = (log_p.exp() * (log_p - ref)).sum()
    (true,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for kind in losses.KL_LOSSES:
        value = (old.exp() * losses.kl_penalty(log_p, ref, mask, kind, old)).sum()
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        assert (torch.allclose(gradient, true) and value.item() == pytest.approx(exact.item())) == (kind == "k3r"), kind
    with pytest.raises(ValueError, match="'k3r'; choose from k1"):
        losses.kl_penalty(log_p, ref, mask, "k3r")


# ------------------------------------------------------------------------------------------------ masked tokens deleted


def deleted(b):
    """The batch without its masked tokens, and without the responses that have no others."""
    kept, seq = torch.unique(b["seq"][b["mask"]], return_inverse=True)
    of = {"group": kept, "parts": kept, "weights": slice(None)}
    return {key: x[of.get(key, b["mask"])] for key, x in b.items()} | {"seq": seq, "kept": kept}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(lengths=LENGTHS, seed=SEEDS)
def test_a_loss_is_that_of_the_batch_without_its_masked_tokens(name, lengths, seed):
    b = slow.random_batch(lengths, seed)
    chosen = {"chosen": (b["seq"] % 2 == 0)[b["mask"]]} if name in COV else {}
    (loss, stats), (twin, of_twin) = call(name, b), call(name, deleted(b), **chosen)
    assert torch.allclose(loss[b["mask"]], twin, atol=1e-12)
    assert all(torch.equal(stats[key][b["mask"]], of_twin[key]) for key in stats)


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=10)
@given(lengths=LENGTHS, seed=SEEDS)
def test_an_advantage_is_that_of_the_batch_without_its_masked_tokens(name, lengths, seed):
    """Where all that was earned was earned on trained tokens."""
    b = slow.random_batch(lengths, seed)
    b["reward"] = torch.where(b["mask"], b["reward"], 0.0)
    twin = deleted(b)
    extra = {"baseline": baseline(b)[twin["kept"]]} if name == "remax" else {}
    assert torch.allclose(estimate(name, b)[b["mask"]], estimate(name, twin, **extra), atol=1e-12)


@settings(max_examples=10)
@given(lengths=LENGTHS, seed=SEEDS)
def test_a_rejection_is_that_of_the_batch_without_its_masked_tokens(lengths, seed):
    b = slow.random_batch(lengths, seed)
    for level in losses.REJECTION_LEVELS:
        kept, twin = (
            losses.rollout_rejection_mask(x["lp"], x["roll"], x["mask"], x["seq"], criteria=[(level, "binary_kl", 0.0, 0.02)])
            for x in (b, deleted(b))
        )
        assert torch.equal(kept[b["mask"]], twin), level

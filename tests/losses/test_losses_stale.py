"""losses.py, part four: formulas for stale tokens and those that only the diffs of examples/forks wire up, by hand, by slow
loops and by enumeration."""

import math

import losses_reference as slow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_losses_policy import F64, LENGTHS, SEEDS

import losses


def test_binary_kl_of_certain_tokens_is_finite():
    x = torch.tensor([0.0, -1e-12, -1e-4, -40.0, -300.0])
    far = losses.binary_kl(x[:, None], x[None, :])
    assert torch.isfinite(far).all() and (far >= -1e-6).all() and not far.diagonal().any()
    p, q = (torch.tensor(v).log() for v in (1 - 1e-4, 1 - 2e-4))  # of float32: 1 - p loses no digits
    assert losses.binary_kl(p, q).item() == pytest.approx(slow.binary_kl(*(x.double().exp().item() for x in (p, q))), rel=1e-3)


# ---------------------------------------------------------------------------------------------------- KL with a ratio


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


# -------------------------------------------------------------------------------------------------- wired up by forks


@settings(max_examples=25)
@given(lengths=LENGTHS, seed=SEEDS, threshold=st.floats(0.01, 0.5), parts=st.integers(1, 3))
def test_the_off_policy_mask_equals_slow_loops_however_the_batch_is_cut(lengths, seed, threshold, parts):
    b = slow.random_batch(lengths, seed)
    of = [b[key] for key in ("lp", "roll", "advantage", "mask", "seq")]
    expected = torch.tensor(slow.off_policy(*(x.tolist() for x in of), threshold))
    for k in range(parts):
        at = b["seq"] % parts == k
        assert torch.equal(losses.off_policy_tokens(*(x[at] for x in of), threshold=threshold), expected[at])


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.floats(0.01, 1))
def test_a_share_of_the_tokens_has_high_entropy(tokens, quantile):
    """With ties: as many as the share says at least, and none that has less entropy than one left out."""
    entropy, mask = torch.tensor([t / 4 for t, _ in tokens]), torch.tensor([m for _, m in tokens], dtype=torch.bool)
    kept = losses.high_entropy_tokens(entropy, mask, quantile=quantile)
    trained, found = sorted(entropy[mask].tolist()), sorted(entropy[kept].tolist())
    assert not kept[~mask].any() and found == trained[len(trained) - len(found) :]
    if trained:
        least = trained[math.ceil(round((1 - quantile) * (len(trained) - 1), 6))]  # of a sorted list, from the definition
        assert found == [x for x in trained if x >= least]
        between = torch.tensor(trained, dtype=torch.float64).quantile(1 - quantile)  # TRL's threshold
        assert found == [x for x in trained if x >= between - 1e-6]


def expected_gradient(centers: bool, logits, q, advantage):
    """Over all tokens of a place that a sampler with probabilities q could draw: the mean of the gradient of reinforce, with
    the baseline of score centering or without."""
    log_p, total = logits.log_softmax(0), torch.zeros_like(logits)
    one, seq = torch.tensor([True]), torch.tensor([0])
    for token in range(len(q)):
        token_loss, _ = losses.reinforce(log_p[token][None], q.log()[token][None], advantage[token][None], one, seq)
        if centers:
            token_loss = token_loss + losses.score_centering((q * log_p).sum()[None], advantage[token][None], one)
        total += q[token] * torch.autograd.grad(token_loss.sum(), logits, retain_graph=True)[0]
    return total


def test_under_the_sampler_a_centered_score_has_no_drift():
    """An advantage that does not depend on the token moves nothing, whoever samples. One that does moves by its covariance with
    the score. Without the baseline there is a drift, unless the policy is the sampler."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=F64, requires_grad=True)
    q = torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=F64)
    flat, uneven = torch.full((4,), 0.7, dtype=F64), torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=F64)
    assert expected_gradient(True, logits, q, flat).abs().max() < 1e-12
    assert expected_gradient(False, logits, q, flat).abs().max() > 0.05
    p = logits.detach().softmax(0)
    scores = torch.eye(4, dtype=F64) - p  # of each token: the gradient of its log-prob
    covariance = sum(q[v] * (uneven[v] - (q * uneven).sum()) * (scores[v] - q @ scores) for v in range(4))
    assert torch.allclose(expected_gradient(True, logits, q, uneven), -covariance)
    assert torch.allclose(*(expected_gradient(centers, logits, p, uneven) for centers in (False, True)))


def test_masked_tokens_have_no_part_in_score_centering():
    expected = torch.tensor([-1.0, float("nan"), -2.0], dtype=F64, requires_grad=True)
    mask = torch.tensor([True, False, True])
    term = losses.score_centering(expected, torch.tensor([2.0, 3.0, -1.0], dtype=F64), mask)
    assert term.tolist() == [-2, 0, 2]
    assert torch.autograd.grad(term.sum(), expected)[0].tolist() == [2, 0, -1]


def test_the_entropys_coefficient_moves_towards_the_target():
    coef = lambda entropy: losses.adaptive_entropy_coef(0.5, entropy, 0.2, 0.25, 0.7)  # noqa: E731
    assert (coef(0.1), coef(0.3)) == (pytest.approx(0.7), pytest.approx(0.25))

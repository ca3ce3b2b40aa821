"""losses.py, part two: policy losses, the value loss and KL, checked by hand, against slow loops (values and gradients), by
enumeration and by invariances; also formulas for stale tokens, and those that only the diffs of examples/forks wire up."""

import math
from functools import partial

import losses_reference as slow
import pytest
import torch
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import losses

F64 = torch.float64
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)
SEEDS = st.integers(0, 9999)
NAMES = [name for name, loss in losses.POLICY_LOSSES.items() if name == loss.function.__name__]  # without aliases
# clips that matter on the random batches: low, high, c
CLIPS = {"gspo": (0.1, 0.15, 3), "gmpo": (0.3, 0.35, 3), "dppo_tv": (0.05, 0.06, 1.3), "dppo_kl": (0.02, 0.03, 1.3)}
CLIPS["luspo"] = CLIPS["gspo"]
HOW_MANY_CLIPS = {"sapo": 0, "reinforce": 0, "kl_cov": 0, "dro": 0, "vespo": 0}  # of those; else 3
HOW_MANY_CLIPS |= {"gspo": 2, "luspo": 2, "gmpo": 2, "cispo": 2, "clip_cov": 2}
COV = ("clip_cov", "kl_cov")


def call(name, b, lp=None, **extra):
    clips = zip(("clip_low", "clip_high", "clip_c"), CLIPS.get(name, (0.2, 0.28, 1.5)), strict=True)
    if name == "decoupled_ppo":
        extra["rollout_log_prob"] = b["roll"]
    if name in COV:
        extra.setdefault("chosen", b["seq"] % 2 == 0)
    lp = b["lp"] if lp is None else lp
    clips = dict(list(clips)[: HOW_MANY_CLIPS.get(name, 3)])
    return losses.POLICY_LOSSES[name](lp, b["old"], b["advantage"], b["mask"], b["seq"], **clips | extra)


def tokens(lp, advantage, old=None, seq=None, mask=None):
    """Positional arguments of a policy loss from lists; ratio = exp(lp) where old is left out."""
    lp = torch.as_tensor(lp, dtype=F64)
    old = torch.zeros_like(lp) if old is None else torch.as_tensor(old, dtype=F64)
    seq = torch.zeros(len(lp), dtype=torch.long) if seq is None else torch.tensor(seq)
    mask = torch.ones(len(lp), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return lp, old, torch.as_tensor(advantage, dtype=F64), mask, seq


def log(*ratios):
    return [math.log(r) for r in ratios]


# ---------------------------------------------------------------------------------------------------------- by hand


LN2, E3 = math.log(2), math.exp(0.3)
TV = tokens(log(0.75, 0.25, 0.6, 0.75, 0.2), [1, -1, 1, -1, 1], old=log(0.5, 0.5, 0.5, 0.5, 0.01))
KL = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)  # of 1/2 to 3/4, and to 1/4
OF_KL = tokens(log(0.75, 0.25, 0.75, 0.25, 0.2), [1, -1, -1, 1, 1], old=log(0.5, 0.5, 0.5, 0.5, 0.01))
INSIDE = [-1.5 * math.log(0.75), 0.5 * math.log(0.25), 1.5 * math.log(0.75), -0.5 * math.log(0.25)]
RATIOS = tokens(log(1, 1.5, 0.5, 1, 1.5, 0.5, 5), [1, 1, 1, -1, -1, -1, -1])  # 5 with A = -1 meets the dual clip at 3
THREE = tokens(log(0.5, 1.1, 2), [1, -1, 2])
COVARIANT = tokens([-3.0, -1, -2, -2], [-2.0, 2, 0, 0], old=[-3.0, -1.5, -2, -2])  # covariances 2, 2, 0, 0
SOME = torch.tensor([True, False, True, False])
BY_HAND = [  # loss, its arguments, knobs, its values, its statistics; those without any are held against slow loops alone
    ("ppo_clip", RATIOS, {}, [-1, -1.2, -0.5, 1, 1.5, 0.8, 3], {"": [0, 1, 0, 0, 0, 1, 0], "_lower": [0] * 6 + [1]}),
    # ratios 2 and 1/2 make a sequence's 1; the other sequence has the geometric mean 1.21, clipped for A > 0 at 1.0004
    (
        "gspo",
        tokens(log(2, 0.5, 1.1, 1.331, 1.21), [3, 3, 1, 1, -1], seq=[0, 0, 1, 1, 2]),
        {},
        [-3, -3, -1.0004, -1.0004, 1.21],
        {"": [0, 0, 1, 1, 0]},
    ),
    # exp(0.4) is the upper clip: d = 0.4 and 1 -> mean (0.4 + 0.4) / 2; A < 0 clips from below: d = -1 -> -0.4, 1 stays
    (
        "gmpo",
        tokens([0.4, 1.0, -1.0, 1.0], [2, 2, -1, -1], seq=[0, 0, 1, 1]),
        {},
        [-2 * math.exp(0.4)] * 2 + [E3] * 2,
        {"": [0, 1, 0, 0], "_lower": [0, 0, 1, 0]},
    ),
    ("cispo", THREE, {}, [0.5 * LN2, 1.1 * math.log(1.1), -1.2 * 2 * LN2], {"": [0, 0, 1]}),
    # p_old 0.5: p 0.75 is 0.25 above (out for A > 0), p 0.25 is 0.25 below (out for A < 0), p 0.6 is in; p_old 0.01: c cuts
    (
        "dppo_tv",
        TV,
        {"clip_c": 10},
        [0, 0, -1.2 * math.log(0.6), 1.5 * math.log(0.75), -10 * math.log(0.2)],
        {"": [1, 1, 0, 0, 0], "_lower": [0, 0, 0, 0, 1]},
    ),
    (
        "dppo_kl",
        OF_KL,
        {"clip_low": KL - 1e-9, "clip_high": 10, "clip_c": 10},
        [INSIDE[0], 0, *INSIDE[2:], -10 * math.log(0.2)],
        {"": [0, 1, 0, 0, 0], "_lower": [0, 0, 0, 0, 1]},
    ),
    ("dppo_kl", OF_KL, {"clip_low": 10, "clip_high": KL + 1e-9, "clip_c": 100}, [*INSIDE, 0], {}),  # 0.01 to 0.2 is farther
    # old / rollout 2, and 8 capped at 5; the ratio to old is 1.5, clipped at 1.2
    ("decoupled_ppo", tokens(log(1.5, 1.5), [1, 1]), {"rollout_log_prob": torch.tensor(log(0.5, 0.125))}, [-2.4, -6], {}),
    ("clip_cov", COVARIANT, {"chosen": SOME}, [0, -2 * 1.2, 0, 0], {"": [1, 0, 1, 0]}),
    ("kl_cov", COVARIANT, {"chosen": ~SOME, "coef": 0.1}, [2, -2 * math.exp(0.5) + 0.05, 0, 0], {}),
]


@pytest.mark.parametrize(("name", "args", "knobs", "expected", "clipped"), BY_HAND)
def test_a_loss_by_hand(name, args, knobs, expected, clipped):
    loss, stats = losses.POLICY_LOSSES[name](*args, **knobs)
    assert loss.tolist() == pytest.approx(expected, rel=1e-6)
    for kind, of in clipped.items():
        assert stats[f"pg_clipfrac{kind}"].tolist() == of
    if name == "decoupled_ppo":
        assert stats["behav_clipfrac"].tolist() == [0, 1]


def test_aliases_and_knobs_of_full_precision():
    """tau is exact in fp64: 1.05 is not an fp32 number."""
    aliases = {"geo_mean": losses.gmpo, "gpg": losses.reinforce}
    assert all(losses.POLICY_LOSSES[name].function is function for name, function in aliases.items())
    loss, _ = losses.sapo(*tokens(log(1.5), [-1]))
    assert loss.item() == pytest.approx(4 / 1.05 / (1 + math.exp(-1.05 * 0.5)), rel=1e-15)
    ten, _ = losses.gspo(*tokens([30.0], [-1]))
    assert ten.item() == pytest.approx(math.exp(10)) and losses.gspo(*tokens([30.0], [-1]), clamp=3.0)[0].item() < 21


def test_importance_weight_by_hand():
    lp, old, _, mask, _ = tokens(log(3, 1, 100, 5), [0] * 4, mask=[True, True, True, False])
    weight = losses.importance_weight(lp.requires_grad_(), old, mask)
    assert weight.tolist() == pytest.approx([3, 1, 20, 1]) and weight[1] == 1 and not weight.requires_grad


@settings(max_examples=25)
@given(LENGTHS, SEEDS, st.floats(0.01, 0.9))
def test_the_choice_of_tokens_equals_slow_loops(lengths, seed, ratio):
    b = slow.random_batch(lengths, seed)
    cov = slow.covariances(b["lp"].tolist(), b["advantage"].tolist(), b["mask"].tolist())
    count = min(len(cov), max(1, int(ratio * len(cov))))
    args = b["lp"], b["advantage"], b["mask"]
    top = losses.top_covariance(*args, ratio=ratio)
    taken = [cov[t] for t in top.nonzero()[:, 0].tolist()]  # compared by value: two may be equal
    assert sorted(taken) == pytest.approx(sorted(cov.values())[len(cov) - count :], abs=1e-9)
    candidates = {t for t, c in cov.items() if 0.2 < c < 1}
    draw = lambda: losses.random_covariance(  # noqa: E731
        *args, ratio=ratio, low=0.2, high=1.0, generator=torch.Generator().manual_seed(seed)
    )
    chosen = set(draw().nonzero()[:, 0].tolist())
    assert chosen <= candidates and len(chosen) == min(count, len(candidates)) and torch.equal(draw(), draw())


@settings(max_examples=25)
@given(LENGTHS, SEEDS, st.floats(0.05, 1))
def test_value_loss_equals_slow_loops(lengths, seed, eps):
    b = slow.random_batch(lengths, seed)
    v, old, target = b["value"].requires_grad_(), b["advantage"], b["reward"]
    loss, _ = losses.value_loss(v, old, target, b["mask"], clip=eps)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    assert not loss[~b["mask"]].any() and not gradient[~b["mask"]].any()
    for t in b["mask"].nonzero()[:, 0].tolist():
        of = v[t].item(), old[t].item(), target[t].item(), eps
        assert loss[t].item() == pytest.approx(slow.value_loss(*of), abs=1e-9)
        assert gradient[t].item() == pytest.approx(slow.slope(slow.value_loss, *of), abs=1e-5)


# --------------------------------------------------------------------------------------------- against slow loops


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(lengths=st.just([]) | LENGTHS, seed=SEEDS, mask_rate=st.sampled_from([0, 0.75, 0.75]))
def test_values_and_gradients_equal_slow_loops(name, lengths, seed, mask_rate):
    """Also of batches without any response, or without any trained token."""
    b = slow.random_batch(lengths, seed, mask_rate)
    low, high, c = CLIPS.get(name, (0.2, 0.28, 1.5))
    mode = losses.default_aggregation("grpo", name)
    x = slow.lists(b)
    chosen = (b["seq"] % 2 == 0).tolist()

    def reference(lp):
        of = (x[key] for key in ("lp", "old", "advantage", "mask", "seq"))
        out = slow.policy_loss(name, lp, *of, low, high, c, chosen=chosen, roll=x["roll"])
        return out, slow.aggregate(out, x["mask"], x["seq"], mode, len(lengths), None)

    lp = b["lp"].clone().requires_grad_()
    loss, stats = call(name, b, lp)
    total = losses.aggregate(loss, b["mask"], b["seq"], mode, losses.denominator(b["mask"], b["seq"], mode, len(lengths)))
    expected, expected_total = reference(x["lp"])
    assert loss.dtype == F64 and total.item() == pytest.approx(expected_total, abs=1e-6)
    assert torch.allclose(loss[b["mask"]], torch.tensor(expected, dtype=F64)[b["mask"]], atol=1e-6)
    assert all(s.shape == lp.shape and s.dtype == torch.bool for s in stats.values())
    (gradient,) = torch.autograd.grad(total, lp)
    step = 1e-6
    for t in range(len(lp)):
        up, down = ([v + s * step * (k == t) for k, v in enumerate(x["lp"])] for s in (1, -1))
        slope = (reference(up)[1] - reference(down)[1]) / (2 * step)
        assert gradient[t].item() == pytest.approx(slope, abs=1e-6), t


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(lengths=LENGTHS, seed=SEEDS, parts=st.integers(1, 4))
def test_ranks_and_micro_batches_change_neither_gradient_nor_statistics(name, lengths, seed, parts):
    b = slow.random_batch(lengths, seed)
    mode = losses.default_aggregation("grpo", name)
    denominator = losses.denominator(b["mask"], b["seq"], mode, len(lengths))
    chosen = b["seq"] % 2 == 0
    home = torch.randint(parts, (len(lengths),), generator=torch.Generator().manual_seed(seed))[b["seq"]]

    def run(places):
        lp = b["lp"].clone().requires_grad_()
        total, sums = 0.0, {}
        for p in places:
            part = {k: v[p] for k, v in b.items() if k not in losses.PER_RESPONSE}
            loss, stats = call(name, part, lp[p], **({"chosen": chosen[p]} if name in COV else {}))
            share = losses.aggregate(loss, part["mask"], part["seq"], mode, denominator)
            total = total + share
            for key, value in stats.items():
                sums[key] = sums.get(key, 0.0) + torch.where(part["mask"], value, 0.0).sum().item()
        return torch.autograd.grad(total, lp)[0], sums

    whole, its_sums = run([torch.ones_like(home, dtype=torch.bool)])
    cut, sums = run([home == k for k in range(parts)])
    assert torch.allclose(whole, cut, atol=1e-12) and sums == pytest.approx(its_sums)


# ------------------------------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("name", NAMES)
def test_non_finite_log_probs_under_a_zero_mask_stay_out(name):
    b = slow.random_batch([3, 3, 2], 1, mask_rate=1.0)
    b["mask"][[1, 6, 7]] = False
    clean, _ = call(name, b)
    lost = {"lp": [math.nan, -math.inf, math.inf], "old": [-math.inf, math.nan, 0.0], "roll": [math.nan] * 3}
    for key, values in lost.items():
        b[key] = b[key].clone()
        b[key][[1, 6, 7]] = torch.tensor(values, dtype=F64)
    lp = b["lp"].requires_grad_()
    extra = {"chosen": None} if name == "kl_cov" else {}
    loss, stats = call(name, b, lp, **extra)
    m = b["mask"]
    penalty = sum(losses.kl_penalty(lp, b["old"], m, kind) for kind in losses.KL_ESTIMATORS)
    total = losses.aggregate(loss + penalty, m, b["seq"], "token-mean", 5.0)
    (gradient,) = torch.autograd.grad(total, lp)
    assert torch.isfinite(loss).all() and torch.isfinite(penalty).all() and torch.isfinite(gradient).all()
    assert not gradient[~m].any() and all(torch.isfinite(s).all() for s in stats.values())
    if name != "kl_cov":
        assert torch.allclose(loss[m], clean[m])


@pytest.mark.parametrize("name", NAMES)
def test_huge_ratios_stay_finite(name):
    b = slow.random_batch([2, 2], 3, mask_rate=1.0)
    b["old"] = b["lp"] - torch.tensor([300.0, -300, 300, -300])
    b = {k: v.float() if v.dtype == F64 else v for k, v in b.items()}
    lp = b["lp"].requires_grad_()
    loss, _ = call(name, b, lp)
    (gradient,) = torch.autograd.grad(loss.sum(), lp)
    assert loss.dtype == torch.float32 and torch.isfinite(loss).all() and torch.isfinite(gradient).all()


# --------------------------------------------------------------------------------------------------------------- KL


def test_a_kl_is_bounded():
    far = losses.kl_penalty(torch.tensor([-50.0]), torch.tensor([-1.0]), torch.tensor([True]), "k3")
    assert far.item() == 10


@settings(max_examples=25)
@given(LENGTHS, SEEDS)
def test_kl_estimators_equal_slow_loops(lengths, seed):
    """The slow twin of k3r multiplies by a ratio that carries a gradient; the code by a detached one."""
    b = slow.random_batch(lengths, seed)
    rows = [*zip(*(b[key].tolist() for key in ("lp", "roll", "old", "mask")), strict=True)]
    for kind in losses.KL_LOSSES:
        lp = b["lp"].clone().requires_grad_()
        out = losses.kl_penalty(lp, b["roll"], b["mask"], kind, b["old"])
        (gradient,) = torch.autograd.grad(out.sum(), lp)
        slope_of = "k2" if kind.endswith("+") else kind
        for t, (*of, m) in enumerate(rows):
            assert out[t].item() == pytest.approx(slow.kl(kind.rstrip("+"), *of) if m else 0, abs=1e-9)
            assert gradient[t].item() == pytest.approx(slow.slope(partial(slow.kl, slope_of), *of) if m else 0, abs=1e-6)


def test_the_adaptive_coefficient():
    # twice the target: +20% at the most, by n / horizon
    assert losses.adaptive_kl_coef(0.5, 0.02, 0.01, 100, 1000) == pytest.approx(0.5 * 1.02)
    assert losses.adaptive_kl_coef(0.5, 0.009, 0.01, 100, 1000) == pytest.approx(0.5 * 0.99)
    assert losses.adaptive_kl_coef(0.5, 0.0, 0.01, 1000, 1000) == pytest.approx(0.4)


# ------------------------------------------------------------------------------------------------------ combinations


def test_combinations_that_make_no_sense_are_refused_with_the_reason():
    for name in losses.POLICY_LOSSES:
        for estimator in losses.ADVANTAGES:
            mode = losses.default_aggregation(estimator, name)
            assert mode in losses.AGGREGATIONS
            if estimator == "grpo":
                losses.check_combination(estimator, name, mode)
    losses.check_combination("grpo", "gspo", "seq-mean-token-sum")
    refused = [
        ("grpo", "gmpo", "token-mean", "length"),
        ("grpo", "geo_mean", "seq-mean-token-sum", "length"),
        ("gae", "gmpo", "seq-mean-token-mean", "averaged away"),
        ("gspo", "gspo", "seq-mean-token-mean", "choose from grpo"),
        ("grpo", "ppo", "token-mean", "choose from ppo_clip"),
        ("grpo", "ppo_clip", "mean", "choose from token-mean"),
    ]
    for estimator, loss, mode, reason in refused:
        with pytest.raises(ValueError, match=reason):
            losses.check_combination(estimator, loss, mode)


def test_the_docs_name_every_loss_and_every_knob_with_its_default():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    for name, loss in losses.POLICY_LOSSES.items():
        row = next(line for line in page.splitlines() if line.startswith("| `") and f"`{name}`" in line.split("|")[1])
        knobs = {k.removeprefix("clip_"): v for k, v in (loss.knobs | loss.choice_knobs).items()}
        assert all(f"{knob}={value:g}" in row for knob, value in knobs.items()), row
        assert (loss.aggregation or "| - |") in row and ("| yes |" in row) == loss.has_ratio, row


# --------------------------------------------------------------------------------------------------------- stale tokens


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

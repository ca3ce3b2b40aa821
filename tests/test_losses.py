"""losses.py against numbers worked out by hand and against slow loops written from the papers."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import losses

F64 = torch.float64


def ragged(lengths, seed=0):
    """A random packed batch: log-probs, advantages and a mask for responses of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    rand = lambda: torch.randn(n, generator=generator, dtype=F64)  # noqa: E731
    seq = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    log_prob = -rand().abs()
    return {
        "log_prob": log_prob.requires_grad_(True),
        "old": (log_prob + 0.4 * rand()).detach(),
        "advantage": rand(),
        "mask": torch.rand(n, generator=generator) > 0.25,
        "seq": seq,
    }


# ------------------------------------------------------------------------------------------------------ advantages


def advantages(name, scores, groups, lengths=None):
    """One value per response: the score goes in on the last token, as the scripts put it."""
    lengths = lengths or [2] * len(scores)
    seq = torch.arange(len(scores)).repeat_interleave(torch.tensor(lengths))
    reward = torch.zeros(sum(lengths), dtype=F64)
    ends = torch.tensor(lengths).cumsum(0) - 1
    reward[ends] = torch.tensor(scores, dtype=F64)
    out = losses.ADVANTAGES[name](reward, torch.ones(len(seq), dtype=torch.bool), seq, torch.tensor(groups))
    assert all(torch.equal(out[seq == i], out[ends[i]].expand(n)) for i, n in enumerate(lengths))
    return out[ends].tolist()


def test_advantages_by_hand():
    # group 7: 1, 0, 0, 1 (mean 1/2, std sqrt(1/3)); group 3: 2, 4 (mean 3, std sqrt 2); interleaved
    scores, groups = [1.0, 2.0, 0.0, 0.0, 4.0, 1.0], [7, 3, 7, 7, 3, 7]
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    assert advantages("grpo", scores, groups) == pytest.approx([a, -b, -a, -a, b, a])
    assert advantages("dr_grpo", scores, groups) == pytest.approx([0.5, -1, -0.5, -0.5, 1, 0.5])
    assert advantages("rloo", scores, groups) == pytest.approx([2 / 3, -2, -2 / 3, -2 / 3, 2, 2 / 3])


def test_groups_of_one_and_equal_scores():
    assert advantages("grpo", [2.0], [0]) == pytest.approx([2 / (1 + 1e-6)])
    assert advantages("dr_grpo", [2.0], [0]) == advantages("rloo", [2.0], [0]) == [0.0]
    for name in losses.ADVANTAGES:
        assert advantages(name, [3.0, 3.0, 3.0], [5, 5, 5]) == pytest.approx([0, 0, 0], abs=1e-9)


def slow_advantages(name, scores, groups):
    out = []
    for score, group in zip(scores, groups, strict=True):
        mine = [s for s, g in zip(scores, groups, strict=True) if g == group]
        mean, n = sum(mine) / len(mine), len(mine)
        if name == "grpo":
            mean, std = (0.0, 1.0) if n == 1 else (mean, statistics.stdev(mine))
            out.append((score - mean) / (std + 1e-6))
        elif name == "dr_grpo":
            out.append(score - mean)
        else:
            others = (sum(mine) - score) / (n - 1) if n > 1 else score
            out.append(score - others)
    return out


@settings(max_examples=60)
@given(
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=12),
    st.randoms(),
)
def test_advantages_equal_slow_loops_in_any_order(name, rows, random):
    scores, groups, lengths = ([float(r[0]) / 4 for r in rows], [r[1] for r in rows], [r[2] for r in rows])
    expected = slow_advantages(name, scores, groups)
    assert advantages(name, scores, groups, lengths) == pytest.approx(expected, abs=1e-6)
    order = random.sample(range(len(rows)), len(rows))
    shuffled = advantages(name, [scores[i] for i in order], [groups[i] for i in order], [lengths[i] for i in order])
    assert shuffled == pytest.approx([expected[i] for i in order], abs=1e-6)


def test_a_score_on_a_masked_token_counts_and_masked_tokens_get_none():
    reward, mask = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([True, False, True, True])
    out = losses.dr_grpo(reward, mask, torch.tensor([0, 0, 1, 1]), torch.tensor([4, 4]))
    assert out.tolist() == [0.5, 0.0, -0.5, -0.5]


# ------------------------------------------------------------------------------------------------------ aggregation


def slow_aggregate(values, masks, lengths, mode, budget):
    rows, at = [], 0
    for n in lengths:
        rows.append([v for v, m in zip(values[at : at + n], masks[at : at + n], strict=True) if m])
        at += n
    if mode == "token-mean":
        return sum(map(sum, rows)) / max(1, sum(map(len, rows)))
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    if mode == "seq-mean-token-sum-norm":
        return sum(map(sum, rows)) / len(rows) / budget
    filled = [sum(row) / len(row) for row in rows if row]
    return sum(filled) / max(1, len(filled))


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=st.integers(0, 99), cut=st.integers(1, 7))
def test_aggregation_equals_slow_loops_however_the_batch_is_cut(mode, lengths, seed, cut):
    batch = ragged(lengths, seed)
    mask, seq, values = batch["mask"], batch["seq"], batch["advantage"]
    denominator = losses.denominator(mask, seq, mode, len(lengths), budget=16)
    expected = slow_aggregate(values.tolist(), mask.tolist(), lengths, mode, 16)
    whole = losses.aggregate(values, mask, seq, mode, denominator)
    assert whole.item() == pytest.approx(expected, abs=1e-9)
    parts = [seq % cut == k for k in range(cut)]  # whole responses to micro-batches, some of them empty
    shares = [losses.aggregate(values[p], mask[p], seq[p], mode, denominator) for p in parts]
    assert sum(shares).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_nothing_to_aggregate_is_zero(mode):
    empty = torch.zeros(0)
    nothing, seq = torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.long)
    assert losses.aggregate(empty, nothing, seq, mode, losses.denominator(nothing, seq, mode, 0)) == 0
    masked = torch.tensor([False, False])
    two = torch.tensor([0, 0])
    denominator = losses.denominator(masked, two, mode, 1)
    assert losses.aggregate(torch.tensor([math.nan, 1.0]), masked, two, mode, denominator) == 0


# ---------------------------------------------------------------------------------------------------- policy losses


def slow_ppo(lp, old, advantage, low, high, c):
    ratio = math.exp(max(-20, min(20, lp - old)))
    clipped = max(-advantage * ratio, -advantage * max(1 - low, min(1 + high, ratio)))
    return min(clipped, -advantage * c) if advantage < 0 else clipped


def test_ppo_clip_by_hand():
    # ratios 1, 1.5, 0.5 for A = 1 and then A = -1; a ratio of 5 with A = -1 meets the dual clip at 3
    ratio = torch.tensor([1, 1.5, 0.5, 1, 1.5, 0.5, 5.0], dtype=F64)
    advantage = torch.tensor([1, 1, 1, -1, -1, -1, -1], dtype=F64)
    mask, seq, zeros = torch.ones(7, dtype=torch.bool), torch.zeros(7, dtype=torch.long), torch.zeros(7, dtype=F64)
    loss, stats = losses.ppo_clip(ratio.log(), zeros, advantage, mask, seq)
    assert loss.tolist() == pytest.approx([-1, -1.2, -0.5, 1, 1.5, 0.8, 3])
    assert stats["pg_clipfrac"].tolist() == [0, 1, 0, 0, 0, 1, 0]
    assert stats["pg_clipfrac_lower"].tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert stats["ppo_kl"].tolist() == pytest.approx((-ratio.log()).tolist())
    higher, _ = losses.ppo_clip(ratio.log(), zeros, advantage, mask, seq, clip_high=0.28, clip_c=4)
    assert higher.tolist() == pytest.approx([-1, -1.28, -0.5, 1, 1.5, 0.8, 4])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 999), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_ppo_clip_equals_slow_loops_in_value_and_gradient(lengths, seed, low, high):
    b = ragged(lengths, seed)
    loss, _ = losses.ppo_clip(
        b["log_prob"], b["old"], b["advantage"], b["mask"], b["seq"], clip_low=low, clip_high=high, clip_c=1.5
    )
    (gradient,) = torch.autograd.grad(loss[b["mask"]].sum(), b["log_prob"])
    step = 1e-6
    for t in range(len(loss)):
        lp, old, a = b["log_prob"][t].item(), b["old"][t].item(), b["advantage"][t].item()
        if not b["mask"][t]:
            assert gradient[t] == 0
            continue
        assert loss[t].item() == pytest.approx(slow_ppo(lp, old, a, low, high, 1.5), abs=1e-9)
        kinks = [math.log(1 - low), math.log(1 + high), math.log(1.5)]
        if min(abs(lp - old - k) for k in kinks) > 1e-4:
            slope = slow_ppo(lp + step, old, a, low, high, 1.5) - slow_ppo(lp - step, old, a, low, high, 1.5)
            assert gradient[t].item() == pytest.approx(slope / (2 * step), abs=1e-6)


def test_at_the_old_policy_the_gradient_is_reinforces():
    b = ragged([3, 5, 1], 4)
    loss, stats = losses.ppo_clip(b["log_prob"], b["log_prob"].detach(), b["advantage"], b["mask"], b["seq"])
    (gradient,) = torch.autograd.grad(loss[b["mask"]].sum(), b["log_prob"])
    assert torch.allclose(gradient[b["mask"]], -b["advantage"][b["mask"]])
    assert all((value == 0).all() for value in stats.values())


def test_non_finite_log_probs_under_a_zero_mask_stay_out():
    log_prob = torch.tensor([-1.0, math.nan, -math.inf, -2.0], requires_grad=True)
    old, advantage = torch.tensor([-1.0, 0.0, math.nan, -2.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    mask, seq = torch.tensor([True, False, False, True]), torch.tensor([0, 0, 1, 1])
    loss, _ = losses.ppo_clip(log_prob, old, advantage, mask, seq)
    loss = loss + losses.kl_penalty(log_prob, old, mask, "k3")
    losses.aggregate(loss, mask, seq, "token-mean", 2.0).backward()
    assert torch.isfinite(loss).all() and torch.allclose(log_prob.grad, torch.tensor([-0.5, 0.0, 0.0, 0.5]))


# --------------------------------------------------------------------------------------------------------------- KL


def test_kl_estimators_by_hand():
    lp, ref = torch.tensor([-1.0, -2.0], dtype=F64), torch.tensor([-1.5, -1.0], dtype=F64)
    mask = torch.tensor([True, True])
    kl = lambda kind: losses.kl_penalty(lp, ref, mask, kind).tolist()  # noqa: E731
    assert kl("k1") == pytest.approx([0.5, -1.0])
    assert kl("k2") == pytest.approx([0.125, 0.5])
    assert kl("k3") == pytest.approx([math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1])


def test_kl_estimators_against_the_exact_divergence():
    """Over all outcomes of a small distribution: k1 and k3 have the KL's value; k2's gradient is the KL's."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=F64, requires_grad=True)
    ref = torch.tensor([0.0, 0.2, 0.1, -0.5], dtype=F64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p, mask = log_p.exp().detach(), torch.ones(4, dtype=torch.bool)
    exact = (log_p.exp() * (log_p - ref)).sum()
    values = {kind: (p * losses.kl_penalty(log_p, ref, mask, kind)).sum() for kind in losses.KL_ESTIMATORS}
    assert values["k1"].item() == pytest.approx(exact.item()) and values["k3"].item() == pytest.approx(exact.item())
    gradient = {kind: torch.autograd.grad(v, logits, retain_graph=True)[0] for kind, v in values.items()}
    (true,) = torch.autograd.grad(exact, logits)
    assert torch.allclose(gradient["k2"], true)
    assert torch.allclose(gradient["k1"], torch.zeros(4, dtype=F64), atol=1e-12) and not torch.allclose(gradient["k3"], true)

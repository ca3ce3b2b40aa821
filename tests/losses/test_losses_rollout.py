"""losses.py, part three: rollout correction, checked by hand, against slow loops, and by invariances."""

import math

import losses_reference as slow
import pytest
import torch
from helpers import compare
from hypothesis import given, settings
from hypothesis import strategies as st

import losses
from rl.algorithm import metrics, whole_batch
from rl.algorithm.args import RolloutCorrectionArgs
from rl.algorithm.words import parse_criteria, parse_threshold
from tools.from_verl.algorithm import CORRECTIONS

F64 = torch.float64
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=6)
SEEDS = st.integers(0, 9999)
# three responses: ratios 2 and 1/2 with a masked token between; 4; 1 (and a row without a trained token)
RATIOS = torch.tensor([2.0, 9.0, 0.5, 4.0, 1.0, 7.0], dtype=F64)
MASK, SEQ = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.bool), torch.tensor([0, 0, 0, 1, 2, 3])
ROLL = torch.full((6,), -3.0, dtype=F64)
BATCH = (ROLL + RATIOS.log(), ROLL, MASK, SEQ)


def test_rejection_of_special_batches():
    """test_rejection_equals_slow_loops has the others."""
    k3 = [2 - math.log(2) - 1, 0.5 + math.log(2) - 1]
    kept = losses.rollout_rejection_mask(*BATCH, criteria=parse_criteria("seq_mean_k1,token_k3", f"0.5_2,{k3[1] + 1e-6}"))
    assert kept.tolist() == [0, 0, 1, 0, 1, 0], "what both criteria leave"
    least = losses.rollout_rejection_mask(ROLL + 1 + RATIOS.log(), *BATCH[1:], criteria=[("batch", "k2", 0.0, 1e-6)])
    assert least.tolist() == [0, 0, 1, 0, 0, 0], "log w is 1.7, 0.3, 2.4, 1: the best token stays, above the bound"
    none = losses.rollout_rejection_mask(*BATCH[:2], torch.zeros_like(MASK), SEQ, criteria=[("batch", "k2", 0.0, 1e-6)])
    assert not none.any()


def test_thresholds_are_read_and_refused_with_the_reason():
    assert parse_threshold("2.0") == (None, 2.0) and parse_threshold("0.999_1.001") == (0.999, 1.001)
    assert parse_threshold(2.0) == (None, 2.0)
    two = [("seq_mean", "k3", 0.0, 0.01), ("token", "k1", 0.5, 2.0)]
    assert parse_criteria("seq_mean_k3,token_k1", "0.01,0.5_2.0") == two
    assert parse_criteria("token_k1", "4") == [("token", "k1", 0.25, 4.0)]
    for text in ("", "a", "2_1", "-1", "0", "1_2_3", "nan", "inf"):
        with pytest.raises(ValueError, match="threshold"):
            parse_threshold(text)
    wrong = [("token_k4", "1"), ("k1", "1"), ("seq_min_k1", "1"), ("token_k3", "0.1_0.2"), ("batch_k2", "0.1_0.2")]
    wrong += [("batch_k1", "2"), ("token_binary", "2"), ("token_k1,token_k3", "1,2,3")]
    for criteria, threshold in wrong:
        with pytest.raises(ValueError, match=criteria.split(",")[0]):
            parse_criteria(criteria, threshold)
    with pytest.raises(ValueError, match="sequence_geometric"):
        losses.rollout_is_weights(*BATCH, level="geometric")


def test_what_the_words_of_a_whole_correction_mean():
    """The words of verl."""
    tis, geometric = (None, 2.0), [("seq_mean", "k1", 0.999, 1.001)]
    meaning = {
        "token_tis": ("token", tis, []),
        "sequence_tis": ("sequence", tis, []),
        "geometric_rs": (None, tis, geometric),
        "sequence_tis_geometric_rs": ("sequence", tis, geometric),
        "icepop": ("token", (0.5, 5.0), []),
    }
    assert set(meaning) == set(CORRECTIONS)
    assert not RolloutCorrectionArgs().corrects_rollout
    for word, (level, bounds, criteria) in meaning.items():
        args = RolloutCorrectionArgs(**{flag[2:].replace("-", "_"): value for flag, value in CORRECTIONS[word].items()})
        args.check(None)
        assert (args.rollout_is, args.weight_bounds, args.rejection_criteria) == (level, bounds, criteria)
        assert args.corrects_rollout


@pytest.mark.parametrize("level", losses.IS_LEVELS)
@settings(max_examples=25)
@given(lengths=LENGTHS, seed=SEEDS, banded=st.booleans(), normalize=st.booleans())
def test_weights_equal_slow_loops(level, lengths, seed, banded, normalize):
    b = slow.random_batch(lengths, seed)
    low, high = (0.8, 1.3) if banded else (None, 1.2)
    args = [b[k] for k in ("lp", "roll", "mask", "seq")]
    found = losses.rollout_is_weights(*args, level=level, low=low, high=high, normalize=normalize)
    expected = slow.rollout_weights(*(x.tolist() for x in args), level, low, high, normalize)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


REJECTIONS = [(level, of) for level in losses.REJECTION_LEVELS for of in losses.DIVERGENCES if (level, of) != ("batch", "k1")]


@pytest.mark.parametrize(("level", "divergence"), REJECTIONS)
@settings(max_examples=15)
@given(lengths=LENGTHS, seed=SEEDS, bound=st.floats(0.02, 0.6))
def test_rejection_equals_slow_loops(level, divergence, lengths, seed, bound):
    b = slow.random_batch(lengths, seed)
    low, high = (1 - bound, 1 + bound) if divergence == "k1" else (0.0, bound)
    mine, token_k3 = (level, divergence, low, high), ("token", "k3", 0.0, 0.05)
    args = [b[k] for k in ("lp", "roll", "mask", "seq")]
    kept = losses.rollout_rejection_mask(*args, criteria=[mine])
    out = slow.rejected(*(x.tolist() for x in args), level, divergence, low, high)
    assert kept.tolist() == [m and not o for m, o in zip(b["mask"].tolist(), out, strict=True)]
    both = losses.rollout_rejection_mask(*args, criteria=[mine, token_k3])
    token = losses.rollout_rejection_mask(*args, criteria=[token_k3])
    assert torch.equal(both, kept & token)


def test_metrics_of_special_batches():
    lost = compare(*BATCH, rejected=torch.arange(6) == 2)  # of three responses with trained tokens the first loses one of two
    assert lost["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)
    none_left = compare(*BATCH, bounds=(90.0, 91.0), rejected=MASK)
    assert none_left["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert none_left["rollout_corr/rollout_rs_seq_masked_fraction"] == none_left["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert none_left["training/rollout_actor_probs_pearson_corr"] == 0  # one of them is constant
    same = compare(BATCH[0], BATCH[0], MASK, SEQ, level="sequence", bounds=(0.5, 2.0), rejected=~MASK)
    assert same["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1)
    assert same["rollout_corr/rollout_is_mean"] == same["rollout_corr/ppl_ratio"] == 1
    assert same["rollout_corr/kl"] == same["rollout_corr/chi2_seq"] == same["rollout_corr/rollout_rs_seq_masked_fraction"] == 0


@settings(max_examples=40)
@given(LENGTHS, SEEDS, st.sampled_from(losses.IS_LEVELS), st.booleans(), st.floats(0.05, 0.5), st.sampled_from([1, 7, 1 << 17]))
def test_metrics_equal_slow_loops_in_pieces_of_any_size(lengths, seed, level, banded, bound, piece):
    b = slow.random_batch(lengths, seed)
    args = [b[k] for k in ("lp", "roll", "mask", "seq")]
    lists = [x.tolist() for x in args]
    low, high = (0.8, 1.3) if banded else (None, 1.3)
    kept = losses.rollout_rejection_mask(*args, criteria=[("token", "k2", 0.0, bound)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "PIECE", piece)
        patch.setattr(whole_batch, "PIECE", piece)
        m = compare(*args, level=level, bounds=(low, high), rejected=b["mask"] & ~kept)
    expected = slow.rollout_metrics(*lists, level, low, high, kept.tolist())
    assert {name: m.get(f"rollout_corr/{name}") for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert all(isinstance(v, float) and math.isfinite(v) for v in m.values()) and bool(m) == bool(b["mask"].any())


@pytest.mark.parametrize("level", losses.IS_LEVELS)
def test_nothing_trained_and_nothing_finite(level):
    none, empty = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    args = (empty, empty, none.bool(), none)
    assert losses.rollout_is_weights(*args, level=level, normalize=True).shape == (0,)
    assert losses.rollout_rejection_mask(*args, criteria=parse_criteria("seq_mean_k1,seq_max_k2", "2")).shape == (0,)
    assert compare(*args, level=level) == {}
    masked = torch.zeros(6, dtype=torch.bool)
    assert not losses.rollout_is_weights(*BATCH[:2], masked, SEQ, level=level, normalize=True).any()
    assert not losses.rollout_rejection_mask(*BATCH[:2], masked, SEQ, criteria=[("seq_sum", "k3", 0.0, 1.0)]).any()
    lp, roll = BATCH[0].clone(), BATCH[1].clone()
    lp[1], roll[5], lp[5] = math.nan, -math.inf, math.inf
    weights = losses.rollout_is_weights(*BATCH, level=level)
    assert torch.equal(losses.rollout_is_weights(lp, roll, MASK, SEQ, level=level), weights)
    assert compare(lp, roll, MASK, SEQ, level=level) == compare(*BATCH, level=level)
    far = torch.tensor([-1000.0, 0.0, 0, 0, 0, 0], dtype=F64)  # finite after the clamp, whatever happens
    assert all(map(math.isfinite, compare(far, -far, MASK, SEQ, level=level).values()))

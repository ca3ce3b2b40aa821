"""Statistics that learners compute in pieces, or each over its own responses, equal those computed at once."""

import re
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_group, run_script

import losses
import train_sync
from rl import parts
from rl.algorithm import metrics, whole_batch
from rl.algorithm.metrics import rollout_metrics
from rl.algorithm.whole_batch import correct_rollout
from rl.learning.batch import Batch, tokens_of

SIZES = (1, 7, 40, 1 << 17)  # of a piece


@pytest.fixture(params=SIZES)
def piece(request, monkeypatch) -> int:
    monkeypatch.setattr(whole_batch, "PIECE", request.param)
    monkeypatch.setattr(metrics, "PIECE", request.param)
    return request.param


def make_batch(seed: int = 0, **flags) -> tuple[Batch, train_sync.Args]:
    """Five groups of four responses, with some masked tokens, and learner log-probs that differ from the generator's."""
    rng = np.random.default_rng(seed)
    batch = Batch.of([make_group(t, rng.integers(1, 30, 4), rng=rng, masked=True) for t in range(5)])
    batch.targets.actor_log_prob = batch.rollout_log_prob + 0.3 * torch.from_numpy(rng.standard_normal(len(batch.seq))).float()
    batch.targets.reward = whole_batch.token_reward(batch)
    batch.targets.advantage = losses.grpo(batch.targets.reward, batch.mask, batch.seq, batch.group)
    return batch, parts.make(train_sync.Args, **flags)


@pytest.mark.parametrize("level", losses.IS_LEVELS)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_correction_is_the_whole_batchs_bit_for_bit(piece, level, normalize):
    flags = {"rollout_is": level, "rollout_is_batch_normalize": normalize}
    flags |= {"rollout_rs": "seq_mean_k3,token_k1", "rollout_rs_threshold": "0.05,0.5_2.0"}
    batch, args = make_batch(**flags)
    inputs = (batch.targets.actor_log_prob, batch.rollout_log_prob, batch.mask.clone(), batch.seq)
    weights = losses.rollout_is_weights(*inputs, level=level, normalize=normalize)
    kept = losses.rollout_rejection_mask(*inputs, criteria=args.correction.rejection_criteria)
    batch.targets.is_weight, batch.targets.rejected = correct_rollout(args.correction, batch)
    assert torch.equal(batch.targets.is_weight, weights) and torch.equal(batch.trained, kept)
    assert 0 < int(kept.sum()) < int(inputs[2].sum())
    assert torch.equal(batch.targets.rejected, inputs[2] & ~kept)


def test_differences_and_advantages_are_of_the_trained_tokens(piece):
    batch, args = make_batch(rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4")
    batch.targets.is_weight, batch.targets.rejected = correct_rollout(args.correction, batch)
    batch.targets.actor_log_prob[3] = torch.nan  # of a later update: not known
    trained = [i for i, m in enumerate(batch.trained.tolist()) if m]
    found = metrics.batch_metrics(batch) | rollout_metrics(args.correction, batch)
    p, q = batch.targets.actor_log_prob.double().exp().tolist(), batch.rollout_log_prob.double().exp().tolist()
    apart = [abs(p[i] - q[i]) for i in trained if i != 3]
    expected = {"mean": statistics.mean(apart), "max": max(apart), "std": statistics.stdev(apart)}
    assert {name: found[f"training/rollout_probs_diff_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    advantages = [batch.targets.advantage.tolist()[i] for i in trained]
    assert found["critic/advantages/mean"] == pytest.approx(statistics.mean(advantages), abs=1e-12)
    assert (found["critic/advantages/min"], found["critic/advantages/max"]) == (min(advantages), max(advantages))
    rewards = [sum(batch.targets.reward[batch.seq == i].tolist()) for i in range(len(batch.lengths))]
    assert found["critic/rewards/mean"] == pytest.approx(statistics.mean(rewards))


def test_a_mini_batchs_span_is_where_its_tokens_are():
    batch, _ = make_batch()
    for prompts in (1, 2, 5):
        for mini in batch.mini_batches(prompts):
            assert torch.equal(torch.arange(len(batch.seq))[whole_batch.span(batch, mini)], tokens_of(batch, mini))
    assert whole_batch.span(batch, torch.zeros(0, dtype=torch.long)) == slice(0, 0)


def test_statistics_are_means_over_the_trained_tokens():
    batch = Batch.of([make_group(0, [4])])
    means = whole_batch.LossMeans(batch)
    for mask, x in (([True, False], [1.0, 9.0]), ([True, True], [4.0, 4.0])):
        tokens = SimpleNamespace(mask=torch.tensor(mask), index=torch.arange(2), forward_only=False)
        means.add(tokens, None, {}, {"x": torch.tensor(x)})
    means.end_update({"actor/grad_norm": 1.0})
    assert means.metrics()["actor/x"] == 3


@pytest.mark.runs
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_a_divided_batch_is_the_whole_one(sequence_parallel):
    """Bit for bit: every estimator's advantages, batch-normalised weights, rejected and chosen tokens, denominators."""
    done = run_script("tests/programs/shares.py", sequence_parallel, ranks=4)
    reported = re.findall(r"rank (\d): (\d+) of (\d+) tokens", done.stdout)
    held = {int(rank): (int(own), int(whole)) for rank, own, whole in reported}
    assert sorted(held) == [0, 1, 2, 3]
    assert sum(own for own, _ in held.values()) == sequence_parallel * held[0][1]

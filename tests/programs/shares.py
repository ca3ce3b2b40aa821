"""Started by test_bookkeeping.py: learners that each hold a part of a batch compute its statistics, and so does
one that holds all of it.

torchrun ... shares.py SEQUENCE_PARALLEL
"""

import dataclasses
import math
import sys

import numpy as np
import torch
from helpers import make_group

import losses
import train_sync
from rl import parts
from rl.algorithm import whole_batch
from rl.algorithm.metrics import batch_metrics, rollout_metrics
from rl.algorithm.staleness import staleness_metrics
from rl.algorithm.whole_batch import correct_rollout
from rl.learning.batch import Batch, Division, micro_batches, tokens_of
from rl.ranks import process

PROMPTS, MAX_TOKENS = 3, 64


def make_groups():
    """Groups of many sizes, with holes in their masks, responses without tokens, some without a score, and equal scores."""
    rng = np.random.default_rng(0)
    groups = [make_group(t, rng.integers(0, 20, 4), prompt=int(rng.integers(1, 9)), rng=rng, masked=True) for t in range(8)]
    return [*groups, make_group(8, [5, 6, 7], score=0.3, rng=rng), make_group(9, [4, 9], unscored=(0, 1), rng=rng)]


def fill(batch: Batch, whole: Batch, places: torch.Tensor) -> None:
    """The fields that a step computes, random and the same for a token wherever it is. places: of the batch's tokens in the
    whole one."""
    generator = torch.Generator().manual_seed(1)
    random = lambda: torch.rand(len(whole.token), generator=generator)[places]  # noqa: E731
    batch.targets.actor_log_prob = batch.rollout_log_prob + 0.5 * random() - 0.25
    batch.targets.old_log_prob = batch.targets.actor_log_prob
    batch.targets.reward = whole_batch.token_reward(batch) - 0.1 * random()
    batch.targets.energy = random()


def advantages(batch: Batch) -> dict[str, torch.Tensor]:
    names = [name for name in losses.ADVANTAGES if name not in ("gae", "gdpo")]
    return {f"advantage by {name}": whole_batch.advantage(losses.ADVANTAGES[name], batch) for name in names}


def per_token(batch: Batch, minis: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    weigh = {"rollout_is": "sequence", "rollout_is_batch_normalize": True}
    args = parts.make(train_sync.Args, rollout_rs="seq_max_k3", rollout_rs_threshold="0.02", **weigh)
    batch.targets.is_weight, batch.targets.rejected = correct_rollout(args.correction, batch)
    found = {"weights": batch.targets.is_weight, "rejected": batch.targets.rejected} | advantages(batch)
    by_batch = parts.make(train_sync.Args, rollout_rs="token_k1,batch_k2", rollout_rs_threshold="0.9_1.2,0.003")
    found["rejected by batch"] = correct_rollout(by_batch.correction, batch)[1]
    batch.targets.advantage = found["advantage by grpo"]
    for loss, knobs in (("clip_cov", ("ratio=0.2", "low=0.0001")), ("kl_cov", ("ratio=0.2",))):
        knobs = parts.make(train_sync.Args, loss_mode=loss, loss_args=knobs).loss.choice_knobs
        batch.targets.chosen = whole_batch.chosen(losses.POLICY_LOSSES[loss], batch, minis, knobs)
        found[f"chosen for {loss}"] = batch.targets.chosen
    return found


def numbers(batch: Batch, minis: list[torch.Tensor]) -> dict[str, float]:
    args = parts.make(train_sync.Args, rollout_is="token")
    found = rollout_metrics(args.correction, batch) | batch_metrics(batch) | staleness_metrics(batch, 3)
    found["mean of responses"] = whole_batch.mean_of_responses(batch.targets.reward, batch)
    found["groups of one"] = whole_batch.groups_of_one(batch)
    for mode in losses.AGGREGATIONS:
        found |= {f"denominator {mode} {i}": whole_batch.denominator(batch, mini, mode, 30) for i, mini in enumerate(minis)}
    return found


def main(ranks) -> None:
    ranks = dataclasses.replace(ranks, sequence_parallel=int(sys.argv[1]))
    whole, part = Batch.of(make_groups()), Batch.of(make_groups(), Division(PROMPTS, MAX_TOKENS, ranks))
    own = torch.nonzero(part.local_lengths).squeeze(1)
    places = tokens_of(whole, own)
    assert torch.equal(whole_batch.sum_over_ranks(part, part.local_lengths.clone()), whole.lengths), (
        "each response is on one learner"
    )
    assert 0 < len(part.token) < len(whole.token)
    for name in ("token", "seq", "mask", "rollout_log_prob", "version"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[places]), name
    minis = whole.mini_batches(PROMPTS)
    for mini in minis:
        for micro in micro_batches(part, mini, MAX_TOKENS, ranks):
            assert torch.equal(part.token[micro.index].long(), micro.labels) or ranks.sequence_parallel > 1
    fill(whole, whole, torch.arange(len(whole.token)))
    fill(part, whole, places)
    expected, found = per_token(whole, minis), per_token(part, minis)
    for name, values in found.items():
        assert torch.equal(values, expected[name][places]), name
    assert expected["rejected"].any() and not expected["rejected"].all()
    assert 0.2 < expected["rejected by batch"].double().mean() < 0.8
    assert expected["chosen for clip_cov"].any() and expected["chosen for kl_cov"].any()
    expected, found = numbers(whole, minis), numbers(part, minis)
    assert expected["groups of one"] > 0
    assert expected.keys() == found.keys()
    for name, value in found.items():
        exact = name.startswith(("denominator", "groups of one", "staleness", "fully_async", "response_length", "critic/score"))
        close = math.isclose(value, expected[name], rel_tol=0 if exact else 1e-6, abs_tol=0 if exact else 1e-6)
        assert close or (math.isnan(value) and math.isnan(expected[name])), (name, value, expected[name])
    print(f"rank {ranks.rank}: {len(part.token)} of {len(whole.token)} tokens", flush=True)


process.run(main)

"""The named rewards of a batch, for gdpo: what is taken, and what is refused with the reason."""

import dataclasses

import pytest
import torch
from helpers import make_group

import train_sync
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.ranges import check
from rl.samples.buffer import SampleBuffer
from rl.samples.group import PENALTY
from rl.samples.prompt_history import PromptHistory
from rl.samples.schedule import AsyncSchedule

GDPO = {"adv_estimator": "gdpo", "rollout_n": 2}


def batch_of(*extras: dict) -> Batch:
    """One group, whose scores are 0, 1, ..."""
    group = make_group(0, [3] * len(extras))
    responses = [dataclasses.replace(r, extra=extra) for r, extra in zip(group.responses, extras, strict=True)]
    return Batch.of([dataclasses.replace(group, responses=responses)])


def test_the_numbers_are_taken_by_name():
    args = train_sync.Args(**GDPO, gdpo_reward_keys=("b", "score", "a"), gdpo_reward_weights=(1.0, 2.0, -1.0))
    check(args)
    found = args.estimator_inputs(batch_of({"a": 1.5, "b": 2.0}, {"b": 3.0, "a": 4.0, "c": 5.0}))
    assert found["parts"].tolist() == [[2, 0, 1.5], [3, 1, 4]] and found["weights"].tolist() == [1, 2, -1]
    assert not args.packs_flat_apart and train_sync.Args().packs_flat_apart, "equal scores may hide rewards that differ"
    empty = train_sync.Args(**GDPO, gdpo_reward_keys=("a", "b")).estimator_inputs(batch_of())
    assert empty["parts"].shape == (0, 2) and empty["weights"].tolist() == [1, 1]


def test_a_group_is_judged_by_each_reward():
    """The scores of both responses are 1, their rewards differ: gdpo learns from the group, grpo does not."""
    group = make_group(0, [3, 3], score=1)
    extras = ({"a": 1.0, "b": 0.0, PENALTY: 0.0}, {"a": 0.0, "b": 1.0, PENALTY: -1.0})
    responses = [dataclasses.replace(r, extra=extra) for r, extra in zip(group.responses, extras, strict=True)]
    group = dataclasses.replace(group, responses=responses)

    def judged(*keys, **flags):
        args = train_sync.Args(**GDPO | {"gdpo_reward_keys": keys, "filter_groups": True, "prompt_sampling": "greso"} | flags)
        buffer = SampleBuffer(AsyncSchedule(), True, 2, args.compared_rewards)
        buffer.add(group)
        ((_, kind),) = PromptHistory(args, None).shown([group])
        assert args.has_signal(group) == (not buffer.dropped) == (kind == "mixed")
        return args.has_signal(group)

    assert judged("a", "b") and judged("score", "b")
    assert not judged("score") and not judged("score", PENALTY), "the penalty on length alone is no signal"
    assert not judged("a", "b", adv_estimator="grpo"), "which looks at the score"


def test_a_response_without_a_number_is_named_unless_it_counts_as_0():
    args = train_sync.Args(**GDPO, gdpo_reward_keys=("a",))
    batch = batch_of({"a": 1.0}, {"c": 2.0, "d": 3.0})
    with pytest.raises(UserError, match=r"--gdpo-reward-keys a: .* but score, c, d. Return it with each"):
        args.estimator_inputs(batch)
    batch.failed = torch.tensor([False, True])  # --on-reward-error zero
    assert args.estimator_inputs(batch)["parts"].tolist() == [[1], [0]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "give --gdpo-reward-keys, each once"),
        ({"gdpo_reward_keys": ("a", "a")}, "give --gdpo-reward-keys, each once"),
        ({"gdpo_reward_keys": ("a", "b"), "gdpo_reward_weights": (1.0,)}, "has 1 numbers for the 2 --gdpo-reward-keys"),
        ({"gdpo_reward_keys": ("a",), "use_kl_in_reward": True}, "Take --use-kl-loss"),
        ({"gdpo_reward_keys": ("a",), "overlong_buffer_len": 4}, "add its number, overlong_penalty"),
        ({"gdpo_reward_keys": ("a",), "rollout_n": 1}, "nothing is learnt. Give --rollout-n at least 2"),
    ],
)
def test_what_would_have_no_part_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        check(train_sync.Args(**GDPO | flags))
    check(train_sync.Args(**GDPO | {"gdpo_reward_keys": ("a", "overlong_penalty"), "overlong_buffer_len": 4}))

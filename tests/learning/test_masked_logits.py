"""Masks on the learners' side: what travels of them, which logits they spare, and what that costs."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from helpers import make_group, run_script
from hypothesis import given
from hypothesis import strategies as st

from rl.learning import flops
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.learning.micro_batches import MicroBatch, micro_batches
from rl.samples.group import Group, Response

MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6)


def group_of(ticket: int, masks: list[list[bool] | None], n: int = 4) -> Group:
    """A group with a response for each mask; of `n` tokens where there is none."""
    group = make_group(ticket, [n if mask is None else len(mask) for mask in masks])
    arrays = [None if mask is None else np.array(mask, bool) for mask in masks]
    responses = [dataclasses.replace(r, mask=mask) for r, mask in zip(group.responses, arrays, strict=True)]
    return dataclasses.replace(group, responses=responses)


@given(st.lists(st.none() | st.lists(st.booleans(), max_size=40), min_size=1, max_size=5))
def test_a_mask_is_in_the_record(masks):
    group = group_of(3, masks)
    back = Group.from_bytes(group.to_bytes())
    found = [None if r.mask is None else r.mask.tolist() for r in back.responses]
    assert found == masks and all(r.mask is None or r.mask.dtype == bool for r in back.responses)
    assert back.differs == group.differs and back.is_flat == group.is_flat


def test_a_mask_costs_a_byte_a_token_and_a_plain_response_nothing():
    tokens = 30_000
    numbers = (np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), np.zeros(tokens, np.int32))
    turns = np.arange(tokens) % 1000 < 240  # 30 turns, of each 760 tokens of a tool
    sizes = [len(Group(0, numbers[0][:9], "", [Response(*numbers, "stop", mask=mask)]).to_bytes()) for mask in (None, turns)]
    assert sizes[0] - 12 * tokens < 600 and sizes[1] - sizes[0] < tokens + 60


@given(MASKS, st.randoms())
def test_a_micro_batch_asks_for_logits_of_the_mask_alone(masks, random):
    """The row has all tokens, and each label is predicted by the token before it, whoever added that."""
    batch = Batch.of([group_of(ticket, [mask, None]) for ticket, mask in enumerate(masks)])
    chosen = random.sample(range(len(batch.lengths)), k=random.randint(1, len(batch.lengths)))
    micro, (places, row) = MicroBatch.of(batch, chosen, torch.device("cpu")), (None, None)
    places, (row,) = micro.layout.gather_index.split(micro.layout.lengths), micro.inputs["input_ids"]
    expected = []
    for i, of_one in zip(chosen, places, strict=True):
        tokens = [*batch.prompts[i], *batch.token[batch.seq == i].tolist()]
        assert row[of_one].tolist() == tokens
        mask = batch.mask[batch.seq == i].tolist()
        expected += [
            (of_one[len(batch.prompts[i]) + t - 1], tokens[len(batch.prompts[i]) + t]) for t, m in enumerate(mask) if m
        ]
    assert list(zip(micro.predict.tolist(), micro.labels.tolist(), strict=True)) == expected
    assert batch.mask[micro.index].all() and torch.equal(batch.token[micro.index].long(), micro.labels)
    assert micro.has_responses and micro.real_tokens == len(row)


def test_log_probs_and_gradient_are_those_of_the_full_computation(models, ranks):
    """A fifth of the tokens, and a micro-batch without any: each log-prob to the bit, the gradient to rounding."""
    learner = Learner(models["qwen3"], LearnerArgs(max_tokens_per_micro_batch=60), ranks, 10, temperature=0.7)
    rng = np.random.default_rng(0)
    masks = [(rng.random(20) < 0.2).tolist() for _ in range(4)] + [[False] * 20] * 4
    masked = Batch.of([group_of(ticket, masks[2 * ticket : 2 * ticket + 2]) for ticket in range(4)])
    full, weight = dataclasses.replace(masked, mask=torch.ones_like(masked.mask)), torch.from_numpy(rng.standard_normal(160))
    found = {}
    for name, batch in {"masked": masked, "full": full}.items():
        micros, kept = micro_batches(batch, torch.arange(8), 60, ranks), masked.mask
        log_prob = learner.log_probs_of("policy", batch, [micros])
        assert (not log_prob[~kept].any()) == (name == "masked")
        for micro in micros:
            out = learner.forward(micro, "loss")
            here = weight[micro.index] * kept[micro.index]
            ((out.log_prob + 0.1 * out.entropy) * here).sum().backward()
        assert len(micros) > 2 and ([len(micro.index) for micro in micros].count(0) > 0) == (name == "masked")
        found[name] = log_prob[kept], torch.cat([p.grad.flatten() for p in learner.policy.parameters()])
        learner.optimizer.zero_grad()
    torch.testing.assert_close(found["masked"][0], found["full"][0], atol=1e-6, rtol=1e-6)
    a, b = (of[1].double() for of in found.values())
    assert b.norm() > 0 and (a - b).norm() / b.norm() < 1e-6


def test_the_head_counts_for_the_mask_alone(models, ranks, monkeypatch):
    """In the MFU: the same layers, and fewer projections."""
    monkeypatch.setattr(flops, "peak_flops", lambda: 1e9)
    learner, metrics = Learner(models["qwen3"], LearnerArgs(), ranks, 10), {}
    for name, mask in {"plain": None, "masked": [True] * 10 + [False] * 30}.items():
        batch = Batch.of([group_of(0, [mask], n=40)])
        metrics[name] = flops.perf_metrics(learner, batch, {"update_actor": 1.0}, 1, forward_only=0.0)
    spared = metrics["plain"]["perf/mfu/actor"] - metrics["masked"]["perf/mfu/actor"]
    assert spared == pytest.approx(30 * 6 * 64 * 32 / 1e9)
    assert metrics["masked"]["perf/total_num_tokens"] == metrics["plain"]["perf/total_num_tokens"] == 44


@pytest.mark.slow
def test_ranks_without_a_trained_token_stay_in_step(models):
    """FSDP, Ulysses and experts on two ranks, with micro-batches, halves of a row, and a mini-batch that train nothing."""
    done = run_script("tests/programs/masked_logits.py", models["qwen3"], models["moe"], ranks=2, timeout=240)
    lines = {name: (int(a), int(b)) for name, a, b in re.findall(r"(.+): (\d) ranks .*, (\d) no logits at all", done.stdout)}
    assert len(lines) == 7 and all(ever for ever, _ in lines.values()), done.stdout
    assert [never for name, (_, never) in lines.items() if "one response" in name] == [1, 1], done.stdout

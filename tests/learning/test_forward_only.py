"""Micro-batches without a training signal run only the forward pass: the gradient equals the full one, metrics cover all
tokens, and a loss that does train such tokens still gets their gradient."""

import numpy as np
import pytest
import torch
from helpers import make_group, relative
from hypothesis import given
from hypothesis import strategies as st
from test_layouts import GROUPS

import losses
import train_sync
from rl import parts
from rl.errors import UserError
from rl.learning import batch as batches
from rl.learning.batch import Batch, Division, pack, pack_apart
from rl.learning.learner import Learner
from rl.ranks.timers import Timers
from rl.samples.group import Group

BOTH_WAYS = {"both_ways": True}  # all tokens get a backward pass
OWN = [name for name, loss in losses.POLICY_LOSSES.items() if name == loss.function.__name__]  # without aliases


@pytest.fixture
def pays(monkeypatch):
    """Make it worthwhile to put a few tokens into a micro-batch of their own."""
    monkeypatch.setattr(batches, "A_PASS", 0)


def make_groups(equal=(0, 2)) -> list[Group]:
    rng = np.random.default_rng(0)
    return [make_group(t, sizes, rng=rng, score=0.3 if t in equal else None) for t, sizes in enumerate(GROUPS)]


class BothWays(train_sync.Args):
    skips_backward = False


def args_of(model: str, both_ways: bool = False, **flags) -> train_sync.Args:
    flags |= {"model": model, "train_batch_size": len(GROUPS), "max_response_length": 20, "lr_warmup_steps": 0}
    return parts.make(BothWays if both_ways else train_sync.Args, **flags)


def taught(model: str, ranks, steps: list[list[Group]], **flags) -> tuple:
    """Return the gradients of all updates, the metrics of all steps, the final weights, and each step's share of forward-only
    tokens."""
    args, gradients, metrics = args_of(model, **flags), [], []
    learner = Learner(model, args.learner, ranks, 10, with_reference=args.loss.needs_reference)
    step = learner.step

    def recorded() -> dict:
        gradients.append(torch.cat([p.grad.flatten() for p in learner.policy.parameters()]))
        return step()

    learner.step = recorded
    for groups in steps:
        metrics.append(train_sync.learn(args, learner, Batch.of(groups, Division.of(args, learner)), Timers()))
    alone = [of_step.pop("perf/forward_only") for of_step in metrics]
    return gradients, metrics, torch.cat([w.flatten() for _, w in learner.weights()]), alone


def assert_the_same(one, other) -> None:
    """Later updates are of weights that AdamW has moved: by rounding where a gradient is 0."""
    for number, (a, b) in enumerate(zip(one[0], other[0], strict=True)):
        assert a.equal(b) or relative(a, b) < (2e-5 if number else 2e-6)
    for a, b in zip(one[1], other[1], strict=True):
        assert a == pytest.approx(b, rel=2e-5, abs=2e-6, nan_ok=True)
    assert relative(one[2], other[2]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("loss", OWN)
def test_every_loss_has_the_gradient_and_the_metrics_of_all(models, ranks, pays, loss):
    """Half of one of two mini-batches has no advantage. Two epochs. Losses that choose tokens, or train all, compute all."""
    flags = {"loss_mode": loss, "ppo_mini_batch_size": 2, "ppo_epochs": 2}
    found = taught(models["qwen3"], ranks, [make_groups()], **flags)
    assert (found[3] == [0.0]) == bool(losses.POLICY_LOSSES[loss].chooses or losses.POLICY_LOSSES[loss].trains_all)
    assert_the_same(found, taught(models["qwen3"], ranks, [make_groups()], **flags, **BOTH_WAYS))


@pytest.mark.parametrize("more", [{"kl_loss_coef": 1e-3}, {"entropy_coeff": 0.1}, {"entropy_coeff": -0.1}])
def test_terms_that_train_every_token_leave_nothing_out(models, ranks, pays, more):
    assert taught(models["qwen3"], ranks, [make_groups()], **more)[3] == [0.0]


ALL = range(len(GROUPS))
TIGHT = {"max_tokens_per_micro_batch": 32}  # one or two responses in a micro-batch
STEPS = {  # flags, the groups of equal scores of each step, the share of forward-only tokens of each step: above, below
    "KL in the reward, an advantage once the weights have changed": (
        {"kl_reward_coef": 0.1, "lr": 1e-2} | TIGHT, [(0, 2), (0, 2)], [(0.2, 1), (-1, 1e-9)]
    ),
    "responses of which every token is rejected": (
        {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": "3"} | TIGHT, [()], [(0, 1)]
    ),
    "no signal at all: AdamW continues with its momentum": ({"lr": 1e-3}, [(0, 2), ALL], [(0, 1), (0.9, 1.1)]),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_what_has_no_advantage_trains_nothing(models, ranks, pays, case):
    flags, equal, shares = STEPS[case]
    found, whole = (taught(models["qwen3"], ranks, [*map(make_groups, equal)], **flags, **more) for more in ({}, BOTH_WAYS))
    assert all(low < share < high for (low, high), share in zip(shares, found[3], strict=True)), found[3]
    assert_the_same(found, whole)


def test_a_script_that_trains_them_nevertheless_is_stopped(models, ranks, pays, monkeypatch):
    plain = train_sync.actor_loss

    def with_a_term_of_its_own(args, t, out, denominator):
        terms, stats = plain(args, t, out, denominator)
        terms["loss"] = terms["loss"] - 1e-3 * out.log_prob.mean() if len(out.log_prob) else terms["loss"]
        return terms, stats

    monkeypatch.setattr(train_sync, "actor_loss", with_a_term_of_its_own)
    with pytest.raises(UserError, match=r"Take the line `micros = whole_batch.forward_only"):
        taught(models["qwen3"], ranks, [make_groups()])
    assert taught(models["qwen3"], ranks, [make_groups()], **BOTH_WAYS)[3] == [0.0]


def test_what_would_take_longer_stays_together(models, ranks):
    assert taught(models["qwen3"], ranks, [make_groups()])[3] == [0.0], "a few tokens are no reason for a pass of their own"


def seconds(plan, lengths, prompts, groups, flat) -> float:
    """Written out: in each pass all ranks wait for the one with most tokens; a pass without any that trains takes a third."""
    total = 0.0
    for of_ranks in zip(*plan, strict=True):
        rows = [sum(lengths[i] - prompts[i] for i in m) + sum({groups[i]: prompts[i] for i in m}.values()) for m in of_ranks]
        alone = any(of_ranks) and all(flat[i] for micro in of_ranks for i in micro)
        total += (batches.A_PASS + max(rows)) * (1 / 3 if alone else 1)
    return total


@given(st.data())
def test_flat_groups_are_packed_apart_where_that_takes_less_time(data):
    ranks, n = data.draw(st.sampled_from([1, 2, 8])), data.draw(st.sampled_from([2, 8]))
    count, part = data.draw(st.integers(1, 64)), data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    prompts, groups = np.repeat(rng.integers(1, 300, count), n).tolist(), np.repeat(np.arange(count), n).tolist()
    lengths = [p + int(m) for p, m in zip(prompts, rng.integers(1, 1500, count * n), strict=True)]
    flat = np.repeat(rng.random(count) < part, n).tolist()
    what, together = (lengths, prompts, groups), pack(lengths, prompts, groups, 4096, ranks)
    plan = pack_apart(*what, flat, 4096, ranks)
    assert sorted(i for of_rank in plan for micro in of_rank for i in micro) == list(range(len(lengths)))
    assert len({len(of_rank) for of_rank in plan}) == 1
    assert all(sum(lengths[i] for i in micro) <= 4096 for of_rank in plan for micro in of_rank)
    if plan == together:
        return
    kinds = [{flat[i] for of_rank in plan for i in of_rank[k]} for k in range(len(plan[0]))]
    alone = kinds.count({True})
    assert alone and kinds == [{True}] * alone + [{False} & {*flat}] * (len(kinds) - alone) and len(kinds) > alone
    assert seconds(plan, *what, flat) < seconds(together, *what, [False] * len(flat))

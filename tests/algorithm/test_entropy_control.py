"""--entropy-target: the weight of the entropy bonus follows its paper's equation, is in the loss, and resumes."""

import json

import pytest
import torch
from helpers import make_group
from hypothesis import given
from hypothesis import strategies as st
from trainer import Trainer

import losses
import train_sync
from rl.algorithm.entropy_control import EntropyControl
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.ranges import check

ENTROPIES = st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 2.0]), max_size=30)


@pytest.fixture(scope="module")
def trainer(demo_model, ranks):
    trainer = Trainer(demo_model, ranks)
    yield trainer
    trainer.learner.entropy_control = None


def slow(entropies, target, delta, first, most):
    """Equation 3.2 of arXiv 2505.22312, its weight within bounds: the weight alpha of each step, 0 in the first."""
    c, alpha = first, [0.0]
    for e in entropies:
        if e < target:
            c = c + delta
        elif e > target:
            c = c - delta
        c = 0.0 if c < 0 else most if c > most else c
        alpha.append(c if e <= target else 0.0)
    return alpha


@given(ENTROPIES, st.sampled_from([0.005, 0.3]), st.sampled_from([0.0, 0.01]), st.integers(0, 30))
def test_the_weight_follows_the_equation_also_where_a_run_resumes(entropies, delta, first, stop):
    args = train_sync.Args(entropy_target=0.2, entropy_coeff=first, entropy_coeff_delta=delta, entropy_coeff_max=0.9)
    control, weights = EntropyControl(args), []
    for step, entropy in enumerate(entropies):
        if step == stop:
            state, control = json.loads(json.dumps(control.state())), EntropyControl(args)
            control.restore(state)
        before = control.applied
        assert control.update(entropy) == {"actor/entropy_coeff": before}
        weights.append(before)
    assert [*weights, control.applied] == slow(entropies, 0.2, delta, first, 0.9)


def test_by_hand():
    new = lambda coef, entropy: losses.adaptive_entropy_coef(coef, entropy, 0.2, 0.005, 0.01)  # noqa: E731
    assert (new(0.0, 0.1), new(0.005, 0.1), new(0.01, 0.1)) == (0.005, 0.01, 0.01)
    assert (new(0.01, 0.3), new(0.002, 0.3), new(0.004, 0.2)) == (0.005, 0.0, 0.004)


def test_the_bonus_is_in_the_loss_of_the_steps_after_one_of_little_entropy(trainer):
    """As large as a fixed one; and a step above the target has none."""
    flags = {"entropy_target": 100.0, "entropy_coeff": 0.25, "entropy_coeff_delta": 0.25}
    control = trainer.learner.entropy_control = EntropyControl(train_sync.Args(**flags))
    found = []
    for entropy in (None, 3.0, 3.0, 101.0, 3.0):
        if entropy is not None:
            control.update(entropy)
        trainer.begin_again()
        trainer.ticket = 0
        ((m, _),) = trainer.steps(1, **flags)
        found.append(((m["actor/pg_loss"] - m["actor/loss"]) / m["actor/entropy"], m["actor/grad_norm"]))
    assert [weight for weight, _ in found] == pytest.approx([0, 0.5, 0.75, 0, 0.75], abs=1e-6)
    trainer.begin_again()
    trainer.ticket = 0
    ((fixed, _),) = trainer.steps(1, entropy_coeff=0.75)
    assert found[2][1] == found[4][1] == fixed["actor/grad_norm"] != found[0][1] == found[3][1]


def test_a_step_that_trains_no_token_or_leaves_the_policy_does_not_steer():
    """Such as one of a critic's warm-up, or one whose tokens are all rejected."""
    control = EntropyControl(train_sync.Args(entropy_target=0.2, entropy_coeff_delta=0.25))
    batch, nothing, rejected = (Batch.of([make_group(0, lengths)]) for lengths in ([3, 4], [0, 0], [3, 4]))
    rejected.targets.rejected = torch.ones_like(rejected.mask)
    assert control.after_step(batch, 0.1, is_frozen=False) == {"actor/entropy_coeff": 0.0}
    before = control.state()
    for its_batch, is_frozen in ((batch, True), (nothing, False), (rejected, False)):
        assert control.after_step(its_batch, 0.0, is_frozen) == {"actor/entropy_coeff": 0.25}
        assert control.state() == before
    assert control.after_step(batch, 0.1, is_frozen=False) == {"actor/entropy_coeff": 0.25}
    assert control.state() == {"coef": 0.5, "is_low": True}


def test_its_state_is_the_learners(trainer):
    args = train_sync.Args(entropy_target=0.2)
    trainer.steps(1)  # the optimizer has a state then
    trainer.learner.entropy_control = EntropyControl(args)
    trainer.learner.entropy_control.update(0.1)
    state = json.loads(json.dumps(trainer.learner.state()))
    trainer.learner.entropy_control = EntropyControl(args)
    trainer.learner.restore(state, None)
    assert trainer.learner.entropy_control.applied == 0.005
    trainer.learner.entropy_control = None
    assert "entropy_control" not in trainer.learner.state()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"loss_agg_mode": "token-sum"}, "--loss-agg-mode token-sum sums over tokens"),
        ({"adv_estimator": "dr_grpo"}, "--loss-agg-mode seq-mean-token-sum-norm sums over tokens"),
        ({"entropy_coeff": -0.1}, "has to be from 0 to --entropy-coeff-max 1"),
        ({"entropy_coeff": 0.1, "entropy_coeff_max": 0.01}, "has to be from 0 to --entropy-coeff-max 0.01"),
    ],
)
def test_what_cannot_be_steered_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        check(train_sync.Args(entropy_target=0.2, **flags))
    args = train_sync.Args(entropy_target=0.2)
    check(args)
    assert not args.skips_backward and not args.packs_flat_apart, "flat groups have an entropy, too"

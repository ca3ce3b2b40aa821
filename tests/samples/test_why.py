"""why.py names the group that made a step what it was."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from helpers import run_script
from trainer import Trainer

import train_sync
import why
from rl import parts
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.ranks.timers import Timers


@pytest.fixture(scope="module")
def trainer(demo_model, ranks):
    return Trainer(demo_model, ranks)


@pytest.fixture(scope="module")
def groups(trainer):
    """64 groups with right and wrong answers, which the demo's model has sampled."""
    args = parts.replace(trainer.args, train_batch_size=64)
    trainer.engine.update(trainer.learner.weights(), version=0)
    made = train_sync.make_batch(args, trainer.generator(args), 0)[0]
    return [
        dataclasses.replace(g, responses=[dataclasses.replace(r, score=float(i % 2)) for i, r in enumerate(g.responses)])
        for g in made
    ]


def poisoned(group, seed: int):
    """The group with a long response that the policy would never have sampled, and that scores best."""
    rng = np.random.default_rng(seed)
    first, *others = group.responses
    tokens = rng.integers(3, 12, 30).astype(np.int32)
    zeros = np.zeros(30, np.float32)
    first = dataclasses.replace(first, token_ids=tokens, log_probs=zeros, versions=np.zeros(30, np.int32), score=9.0)
    return dataclasses.replace(group, responses=[first, *others])


def gradients_of(trainer, groups, **flags) -> why.Gradients:
    args = parts.replace(trainer.args, train_batch_size=len(groups), **flags)
    trainer.begin_again()
    trainer.learner.args = args.learner
    return why.Gradients(args, train_sync, trainer.learner, Batch.of(groups), Timers())


@pytest.mark.slow
def test_one_poisoned_group_of_64_is_found_in_seven_replays(trainer, groups):
    for seed in range(20):
        place = random.Random(seed).randrange(64)
        batch = [poisoned(group, seed) if i == place else group for i, group in enumerate(groups)]
        before = trainer.weights()
        gradients = gradients_of(trainer, batch)
        first, second, *_ = why.search(gradients, [group.ticket for group in batch])
        assert (first.ticket, gradients.replays) == (groups[place].ticket, 7), seed
        assert first.norm > second.norm and torch.equal(trainer.weights(), before), "the weights remain"


@pytest.mark.parametrize(
    "flags", [{}, {"loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.01}, {"ppo_mini_batch_size": 4}]
)
def test_the_gradients_of_parts_add_up_to_that_of_the_step(trainer, groups, flags):
    """Which is the gradient that the step would take."""
    batch = groups[:8]
    tickets = [group.ticket for group in batch]
    gradients = gradients_of(trainer, batch, **flags)
    whole = gradients.of(tickets)
    parts_of = [gradients.of([ticket]) for ticket in tickets]
    assert len(whole) == 8 // flags.get("ppo_mini_batch_size", 8)
    for update, total in enumerate(whole):
        together = sum(part[update] for part in parts_of)
        assert torch.allclose(together, total, atol=1e-5 + 1e-4 * float(total.abs().max()))
    if len(whole) == 1:
        norm = train_sync.learn(gradients.args, trainer.learner, gradients.batch, Timers())["actor/grad_norm"]
        assert norm == pytest.approx(float(whole[0].double().norm()), rel=1e-4)


def test_the_largest_groups_are_named_with_their_parts(trainer, groups):
    """As computed for every group; their shares add up to 1."""
    batch = groups[:6]
    gradients = gradients_of(trainer, batch)
    found = why.search(gradients, [group.ticket for group in batch])
    (whole,) = gradients.of([group.ticket for group in batch])
    for part in found:
        (own,) = gradients.of([part.ticket])
        assert part.norm == pytest.approx(float(own.norm() / whole.norm()), rel=1e-3)
    assert [part.norm for part in found] == sorted((part.norm for part in found), reverse=True) and len(found) == 6
    assert sum(part.share for part in found) == pytest.approx(1, abs=1e-3)
    flat = [dataclasses.replace(g, responses=[dataclasses.replace(r, score=1.0) for r in g.responses]) for g in batch]
    assert why.search(gradients_of(trainer, flat), [group.ticket for group in flat]) == []


@pytest.mark.parametrize("words", [[], ["runs/a"], ["runs/a", "--step"], ["runs/a", "--step", "x"], ["--step", "1", "runs/a"]])
def test_what_cannot_be_asked_is_one_message(words):
    with pytest.raises(UserError, match="give a run and a step"):
        why.read(words)


@pytest.mark.runs
def test_a_step_of_a_run_by_one_learner_and_by_two(demo_model, tmp_path):
    flags = ["--total-training-steps", 3, "--test-freq", 0, "--output-dir", tmp_path, "--experiment-name", "a"]
    run_script("train_sync.py", *flags, "--lr", 1e-3)
    said = {n: run_script("why.py", tmp_path / "a", "--step", 3, ranks=n).stdout for n in (None, 2)}
    lines = [[line for line in text.splitlines() if "demo row " in line] for text in said.values()]
    assert lines[0] == lines[1] and len(lines[0]) == why.LOOKED_AT
    assert "step 3: 8 groups, 7 replays of the step" in said[2] and f"python view.py {tmp_path}/a --exact 3" in said[2]
    done = run_script("why.py", tmp_path / "a", "--step", 9, check=False)
    assert done.returncode == 1 and "step 9 is not in" in done.stderr

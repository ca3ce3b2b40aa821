"""why.py names the group that made a step what it was."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from helpers import run_script

import train_sync
import why
from rl import parts
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.ranks.timers import Timers


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


def step_of(trainer, groups, **flags) -> why.Step:
    args = parts.replace(trainer.args, train_batch_size=len(groups), **flags)
    trainer.begin_again()
    trainer.learner.args = args.learner
    return why.Step(args, train_sync, trainer.learner, Batch.of(groups), Timers())


def alone(trainer, groups, monkeypatch, **flags) -> list[torch.Tensor]:
    """Each group's gradient: that of the step's loss over this group's tokens, all others being masked."""
    found = []
    actor_loss = train_sync.actor_loss
    for place in range(len(groups)):
        step = step_of(trainer, groups, **flags)
        of = step.batch.group

        def masked(args, t, out, denominator, place=place, of=of):
            mask = t.mask & (of[t.seq] == place)
            return actor_loss(args, dataclasses.replace(t, mask=mask), out, denominator)

        monkeypatch.setattr(train_sync, "actor_loss", masked)
        step.replay()
        found.append(torch.cat([x.flatten().double() for x in step.take_gradient()]))
    monkeypatch.undo()
    return found


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.01},
        {"ppo_mini_batch_size": 4},
        {"ppo_mini_batch_size": 4, "ppo_epochs": 2},
        {"max_tokens_per_micro_batch": 40},  # a group has several micro-batches
        {"adv_estimator": "reinforce_plus_plus", "kl_loss_coef": 1e-3},
    ],
)
def test_every_group_has_the_gradient_of_its_own_tokens(trainer, groups, monkeypatch, flags):
    """As by masking all others; the parts add up to the gradient that the step takes, and the largest comes first."""
    batch = groups[:8]
    step = step_of(trainer, batch, **flags)
    before = trainer.weights()
    found = why.measure(step)
    assert torch.equal(trainer.weights(), before), "the weights remain"
    own = alone(trainer, batch, monkeypatch, **flags)
    whole = sum(own)
    square = float(whole @ whole)
    for part in found:
        its = own[step.batch.tickets.index(part.ticket)]
        assert part.norm == pytest.approx(math.sqrt(float(its @ its) / square), abs=1e-4)
        assert part.share == pytest.approx(float(its @ whole) / square, abs=1e-4)
    assert [part.norm for part in found] == sorted((part.norm for part in found), reverse=True) and len(found) == 8
    assert sum(part.share for part in found) == pytest.approx(1, abs=1e-3)
    if not {"ppo_mini_batch_size", "ppo_epochs"} & {*flags}:
        norm = train_sync.learn(step.args, trainer.learner, step.batch, Timers())["actor/grad_norm"]
        assert norm == pytest.approx(math.sqrt(square), rel=1e-4)


def test_a_step_without_a_gradient_and_one_that_is_not_finite(trainer, groups):
    flat = [dataclasses.replace(g, responses=[dataclasses.replace(r, score=1.0) for r in g.responses]) for g in groups[:6]]
    step = step_of(trainer, flat)
    assert why.measure(step) == []
    broken = [*groups[:6]]
    first, *others = broken[3].responses
    broken[3] = dataclasses.replace(broken[3], responses=[dataclasses.replace(first, score=math.inf), *others])
    step = step_of(trainer, broken)
    assert [part.ticket for part in why.measure(step)] == [broken[3].ticket]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: run, --step"),
        (["runs/a"], "required: --step"),
        (["runs/a", "--step", "x"], "--step: invalid int value: 'x'"),
        (["--step", "1", "runs/a"], "runs/a is no run that recorded its samples"),
    ],
)
def test_what_cannot_be_asked_is_one_message(words, message):
    with pytest.raises(UserError, match=message):
        why.read(words)


@pytest.mark.runs
def test_a_step_of_a_run_by_one_learner_and_by_two(demo_model, tmp_path):
    flags = ["--total-training-steps", 3, "--test-freq", 3, "--output-dir", tmp_path, "--experiment-name", "a"]
    run_script("train_sync.py", *flags, "--lr", 1e-3)
    said = {n: run_script("why.py", tmp_path / "a", "--step", 3, ranks=n).stdout for n in (None, 2)}
    lines = [[line for line in text.splitlines() if "demo row " in line or "others" in line] for text in said.values()]
    assert lines[0] == lines[1] and len(lines[0]) == why.SHOWN + 1
    assert "step 3: 8 groups" in said[2] and f"python view.py {tmp_path}/a --exact 3" in said[2]
    done = run_script("why.py", tmp_path / "a", "--step", 9, check=False)
    assert done.returncode == 1 and "step 9 is not in" in done.stderr

    # What validation would be without a group: without none, it is that of the run.
    ticket = lines[0][0].split()[0]
    steps = ("--from-step", 3, "--to-step", 3, "--output-dir", tmp_path / "replays")
    validated = ("replay.py", tmp_path / "a", *steps, "--without")
    said = {without: run_script(*validated, *without).stdout for without in ((), (ticket,))}
    for without, text in said.items():
        (line,) = (line.split() for line in text.splitlines() if line.endswith("val-core/demo/acc/mean@1"))
        assert line[0] == line[1] or without
        assert f"without {ticket if without else 'nothing'}, and of the run" in text
    assert "the weights are bit for bit those of" in said[()] and "the weights" not in said[(ticket,)]
    done = run_script(*validated, 999, check=False)
    assert done.returncode == 1 and "--without 999: the tickets of steps 1 to 3 do not have it" in done.stderr


def poisoned(group, seed: int):
    """The group with a long response that the policy would never have sampled, and that scores best."""
    rng = np.random.default_rng(seed)
    first, *others = group.responses
    tokens = rng.integers(3, 12, 30).astype(np.int32)
    zeros = np.zeros(30, np.float32)
    first = dataclasses.replace(first, token_ids=tokens, log_probs=zeros, versions=np.zeros(30, np.int32), score=9.0)
    return dataclasses.replace(group, responses=[first, *others])


@pytest.mark.slow
def test_a_poisoned_group_of_64_is_found(trainer, groups):
    for seed in range(20):
        place = random.Random(seed).randrange(64)
        batch = [poisoned(group, seed) if i == place else group for i, group in enumerate(groups)]
        step = step_of(trainer, batch)
        found = why.measure(step)
        assert (found[0].ticket, len(found)) == (groups[place].ticket, 64), seed

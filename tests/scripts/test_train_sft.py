"""A supervised start: loss and gradient are transformers', however rows are packed, and what is saved starts the others."""

import pytest
from helpers import demo, flat_gradient, make_demonstrations, padded_loss, relative

import train_sft
from rl import flags, parts
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.ranks.timers import Timers
from rl.supervised import set_up, to_groups


@pytest.mark.parametrize("tokens", [21, 40, 8192])  # one row after the other, a few together, all together
def test_loss_and_gradient_are_those_of_transformers(ranks, models, tokens, monkeypatch):
    path, rows, found = models["qwen2-untied"], make_demonstrations(1, 2, 3, 2, 1), []
    loss, gradient = padded_loss(path, rows)
    args = parts.make(train_sft.Args, max_tokens_per_micro_batch=tokens)
    learner = Learner(path, args.learner, ranks, 10)
    step = learner.step
    monkeypatch.setattr(learner, "step", lambda: found.append(flat_gradient(learner.policy)) or step())
    batch = Batch.of(to_groups(rows, {i: i for i in range(len(rows))}))
    metrics = train_sft.learn(args, learner, batch, Timers())
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5) and metrics["actor/nll"] == pytest.approx(loss, rel=1e-5)
    assert relative(found[0], gradient) < 1e-5


def test_adapters_are_checked_before_the_weights_are_read(demo_model):
    of = lambda *words: set_up(flags.read(train_sft.Args, args=["--test-freq", "0", *words]), "train_sft.py")  # noqa: E731
    with pytest.raises(UserError, match=r"--lora-target all-linear: --model .* is a mixture"):
        of("--model", demo("demo-moe"), "--lora-rank", "4")
    with pytest.raises(UserError, match=r"--lora-target k_projection: no linear layer"):
        of("--model", demo_model, "--lora-rank", "4", "--lora-target", "k_projection")
    of("--model", demo_model, "--lora-rank", "4")


def test_val_only_needs_something_to_validate_on(demo_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    args = flags.read(train_sft.Args, args=["--val-only", "--train-files", str(tmp_path / "rows.jsonl")])
    with pytest.raises(UserError, match="--val-only: there is nothing to validate on"):
        set_up(args, "train_sft.py")

"""A supervised start: loss and gradient are transformers', however rows are packed, and what is saved starts the others."""

import contextlib

import numpy as np
import pytest
import torch
from helpers import SMALL
from transformers import AutoModelForCausalLM, Qwen2Config

import train_sft
from rl import flags
from rl.data.demonstrations import Demonstration
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.ranks import dist
from rl.supervised import to_groups


@pytest.fixture(scope="module")
def ranks():
    yield dist.init()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def rows() -> list[Demonstration]:
    """Of one, two and three answers, of different lengths."""
    rng, out = np.random.default_rng(0), []
    for answers in (1, 2, 3, 2, 1):
        parts = [(int(rng.integers(1, 7)), trained) for _ in range(answers) for trained in (False, True)]
        trained = np.concatenate([np.full(n, word) for n, word in parts])
        out.append(Demonstration(rng.integers(2, 32, len(trained)).astype(np.int32), trained))
    return out


@pytest.fixture(scope="module")
def by_transformers(rows, tmp_path_factory) -> tuple[str, float, torch.Tensor]:
    """The model, its loss on a padded batch with labels of -100, and the gradient, in double precision."""
    torch.manual_seed(0)
    path = str(tmp_path_factory.mktemp("model"))
    AutoModelForCausalLM.from_config(Qwen2Config(**SMALL)).save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).double()
    ids, labels, seen = (torch.full((len(rows), 64), value) for value in (0, -100, 0))
    for place, row in enumerate(rows):
        n = len(row.ids)
        ids[place, :n], seen[place, :n] = torch.from_numpy(row.ids).long(), 1
        labels[place, :n] = torch.where(torch.from_numpy(row.trained), ids[place, :n], -100)
    loss = model(input_ids=ids, attention_mask=seen, labels=labels).loss
    loss.backward()
    return path, float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("tokens", [21, 40, 8192])  # one row after the other, a few together, all together
def test_loss_and_gradient_are_those_of_transformers(ranks, rows, by_transformers, tokens, monkeypatch):
    path, loss, gradient = by_transformers
    args = train_sft.Args(max_tokens_per_micro_batch=tokens)
    learner = Learner(path, args, ranks, 10)
    learner.begin_step(1)
    found = []
    step = learner.step
    grads = lambda: torch.cat([p.grad.flatten() for p in learner.policy.parameters()]).double()  # noqa: E731
    monkeypatch.setattr(learner, "step", lambda: found.append(grads()) or step())
    batch = Batch.of(to_groups(rows, {i: i for i in range(len(rows))}))
    metrics = train_sft.learn(learner, batch, lambda name: contextlib.nullcontext())
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5) and metrics["actor/nll"] == pytest.approx(loss, rel=1e-5)
    assert float((found[0] - gradient).norm() / gradient.norm()) < 1e-5


def test_its_help_has_no_flag_of_samples_and_rewards(capsys):
    with pytest.raises(SystemExit):
        flags.read(train_sft.Args, args=["--help-all"])
    shown = capsys.readouterr().out
    for name in ("reward", "rollout-n", "temperature", "adv-estimator", "ref-offload", "ppo-epochs", "router-replay", "engine"):
        assert f"--{name} " not in shown
    assert "--messages-key" in shown and "--train-batch-size" in shown

"""What the policy's distributions decide before the update: tokens of large entropy, and the optimal token baseline."""

import dataclasses
import math

import losses_reference as slow
import numpy as np
import pytest
import torch
from helpers import SMALL, make_group
from hypothesis import given
from hypothesis import strategies as st
from trainer import Trainer
from transformers import AutoModelForCausalLM, Qwen2Config

import losses
import train_sync
from rl.algorithm.spread import where_entropy_is_high
from rl.errors import UserError
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.model import policy
from rl.ranges import check

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def trainer(demo_model, ranks):
    return Trainer(demo_model, ranks)


def with_support(response, rng):
    """The response, with a record of the token itself and up to three others in each place."""
    rows = np.full((len(response.token_ids), 5), -1, np.int32)
    for row, token in zip(rows, response.token_ids, strict=True):
        others = rng.permutation([t for t in range(SMALL["vocab_size"]) if t != token])[: rng.integers(0, 4)]
        row[: 1 + len(others)] = [*others, token]
    return dataclasses.replace(response, support=rows)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("at_once", [policy.LOGITS_AT_ONCE, 64])
def test_energy_and_entropy_are_those_of_transformers(ranks, tmp_path, monkeypatch, at_once, keeps):
    """In double precision, the energy by automatic differentiation; also where logits are computed two tokens at a time. With
    --keep-sampling-mask the energy is of the policy over the tokens that could be sampled, as the gradient is."""
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**SMALL)).save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    groups = [make_group(t, rng.integers(1, 9, 3), prompt=4, rng=rng, masked=True) for t in range(3)]
    if keeps:
        groups = [dataclasses.replace(g, responses=[with_support(r, rng) for r in g.responses]) for g in groups]
    learner, batch = Learner(str(tmp_path), LearnerArgs(), ranks, 10, TEMPERATURE), Batch.of(groups)
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), 40, ranks)
    energy, entropy = learner.spread_of(batch, [micros])
    model, expected = AutoModelForCausalLM.from_pretrained(tmp_path).double(), []
    for group in groups:
        for r in group.responses:
            row = torch.tensor([[*group.prompt_ids.tolist(), *r.token_ids.tolist()]])
            logits = model(row).logits[0, len(group.prompt_ids) - 1 : -1] / TEMPERATURE
            for place, token in enumerate(r.token_ids.tolist()):
                x = logits[place].detach().requires_grad_()
                those = [t for t in r.support[place].tolist() if t >= 0] if keeps else list(range(len(x)))
                (gradient,) = torch.autograd.grad(x[those].log_softmax(0)[those.index(token)], x)
                p, trained = x.detach().softmax(0), r.mask is None or bool(r.mask[place])
                expected.append([float((gradient**2).sum()) * trained, -float((p * p.log()).sum()) * trained])
    assert len(micros) > 1
    torch.testing.assert_close(
        torch.stack([energy, entropy], 1).double(), torch.tensor(expected).double(), atol=1e-5, rtol=1e-5
    )


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.floats(0.01, 1))
def test_a_share_of_the_tokens_is_kept(tokens, quantile):
    """With ties: as many as the share says at least, and none that has less entropy than one left out."""
    entropy, mask = torch.tensor([t / 4 for t, _ in tokens]), torch.tensor([m for _, m in tokens], dtype=torch.bool)
    kept = losses.high_entropy_tokens(entropy, mask, quantile=quantile)
    trained, found = sorted(entropy[mask].tolist()), sorted(entropy[kept].tolist())
    assert not kept[~mask].any() and found == trained[len(trained) - len(found) :]
    if trained:
        least = trained[math.ceil(round((1 - quantile) * (len(trained) - 1), 6))]  # of a sorted list, from the definition
        assert found == [x for x in trained if x >= least]
        between = torch.tensor(trained, dtype=torch.float64).quantile(1 - quantile)  # TRL's threshold
        assert found == [x for x in trained if x >= between - 1e-6]


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "decoupled_ppo"])
def test_the_loss_is_0_elsewhere(loss):
    """Values and gradients are the plain loss's on the tokens that are kept, and exactly 0 on the others."""
    b = slow.random_batch([5, 1, 7, 3], seed=4)
    plain, lp = losses.POLICY_LOSSES[loss], b["lp"].clone().requires_grad_()
    kept = losses.high_entropy_tokens(b["energy"], b["mask"], quantile=0.4)
    restricted = where_entropy_is_high(plain)
    inputs = {"rollout_log_prob": b["roll"]} if "rollout_log_prob" in plain.inputs else {}
    what = (b["old"], b["advantage"], b["mask"], b["seq"])
    token_loss, stats = restricted(lp, *what, high_entropy=kept, **inputs)
    expected, same = plain(lp, *what, **inputs)
    weight = torch.linspace(1, 2, len(lp), dtype=lp.dtype)
    (gradient,) = torch.autograd.grad((token_loss * weight)[b["mask"]].sum(), lp)
    (wanted,) = torch.autograd.grad((expected * weight)[kept].sum(), lp)
    assert torch.equal(token_loss[kept], expected[kept]) and not token_loss[~kept].any() and stats.keys() == same.keys()
    assert torch.equal(gradient, wanted) and 0 < kept.sum() < b["mask"].sum() and "high_entropy" in restricted.inputs


def test_a_step_trains_tokens_of_large_entropy_however_it_is_cut(trainer):
    """The same gradient for small and large micro-batches, that of the tokens kept alone, and not that without the flag."""
    found = {}
    for tokens, quantile in ((4096, 0.3), (40, 0.3), (4096, 1.0)):
        trainer.begin_again()
        trainer.ticket = 0
        ((metrics, batch),) = trainer.steps(1, top_entropy_quantile=quantile, max_tokens_per_micro_batch=tokens)
        found[tokens, quantile] = metrics["actor/grad_norm"], metrics["actor/pg_loss"], batch.targets.high_entropy
    (norm, loss, kept), (same, same_loss, same_kept), (other, _, none) = found.values()
    assert same == pytest.approx(norm, rel=1e-4) and same_loss == pytest.approx(loss, abs=1e-6)
    assert torch.equal(kept, same_kept) and 0.28 <= kept.double().mean() < 0.5
    assert abs(other - norm) > 0.05 * norm and none is None and batch.targets.energy is None
    expected = -(batch.targets.advantage * kept).sum() / len(kept)  # on policy: the mean over all tokens
    assert loss == pytest.approx(float(expected), abs=1e-6)


def test_a_steps_advantages_are_the_optimal_token_baselines(trainer):
    trainer.begin_again()
    ((_, batch),) = trainer.steps(1, adv_estimator="optimal_token_baseline")
    t = batch.targets
    what = (t.reward, batch.mask, batch.seq, batch.group, t.energy)
    expected = slow.optimal_token_baseline(*(x.tolist() for x in what))
    assert t.advantage.tolist() == pytest.approx(expected, abs=1e-6) and t.advantage.any() and (t.energy >= 0).all()


def test_a_plain_run_has_no_further_pass(trainer, monkeypatch):
    monkeypatch.setattr(Learner, "spread_of", None)
    trainer.steps(1)
    assert not train_sync.Args().needs_spread and train_sync.Args().loss_inputs == ()


def test_a_loss_of_whole_responses_is_refused():
    with pytest.raises(UserError, match=r"--top-entropy-quantile leaves tokens out .* gmpo has one ratio"):
        check(train_sync.Args(top_entropy_quantile=0.2, loss_mode="gmpo"))

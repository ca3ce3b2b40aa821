"""--score-centering: under the sampler its gradient has no drift; on policy it is reinforce's; what it cannot do is refused."""

import pytest
import torch
from trainer import Trainer

import losses
import train_async
import train_sync
from rl import parts
from rl.algorithm.spread import centered
from rl.errors import UserError
from rl.ranges import check

F64 = torch.float64
CENTERED = {"score_centering": True, "loss_mode": "reinforce", "keep_sampling_mask": True, "top_k": 4}


@pytest.fixture(scope="module")
def trainer(demo_model, ranks):
    return Trainer(demo_model, ranks)


def expected_gradient(loss, logits, q, advantage):
    """Over all tokens of a place that a sampler with probabilities q could draw: the mean of the loss's gradient."""
    log_p, total = logits.log_softmax(0), torch.zeros_like(logits)
    one, seq = torch.tensor([True]), torch.tensor([0])
    for token in range(len(q)):
        more = {"expected_log_prob": (q * log_p).sum()[None]} if "expected_log_prob" in loss.inputs else {}
        token_loss, _ = loss(log_p[token][None], q.log()[token][None], advantage[token][None], one, seq, **more)
        total += q[token] * torch.autograd.grad(token_loss.sum(), logits, retain_graph=True)[0]
    return total


def test_under_the_sampler_there_is_no_drift():
    """An advantage that does not depend on the token moves nothing, whoever samples. One that does moves by its covariance with
    the score. Without the baseline there is a drift, unless the policy is the sampler."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=F64, requires_grad=True)
    q = torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=F64)
    plain = losses.POLICY_LOSSES["reinforce"]
    flat, uneven = torch.full((4,), 0.7, dtype=F64), torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=F64)
    assert expected_gradient(centered(plain), logits, q, flat).abs().max() < 1e-12
    assert expected_gradient(plain, logits, q, flat).abs().max() > 0.05
    p = logits.detach().softmax(0)
    scores = torch.eye(4, dtype=F64) - p  # of each token: the gradient of its log-prob
    covariance = sum(q[v] * (uneven[v] - (q * uneven).sum()) * (scores[v] - q @ scores) for v in range(4))
    assert torch.allclose(expected_gradient(centered(plain), logits, q, uneven), -covariance)
    on_policy = [expected_gradient(loss, logits, p, uneven) for loss in (plain, centered(plain))]
    assert torch.allclose(*on_policy)


def test_masked_tokens_have_no_part():
    expected = torch.tensor([-1.0, float("nan"), -2.0], dtype=F64, requires_grad=True)
    mask = torch.tensor([True, False, True])
    term = losses.score_centering(expected, torch.tensor([2.0, 3.0, -1.0], dtype=F64), mask)
    assert term.tolist() == [-2, 0, 2]
    assert torch.autograd.grad(term.sum(), expected)[0].tolist() == [2, 0, -1]
    loss = centered(losses.POLICY_LOSSES["gpg"])
    assert loss.has_ratio and loss.inputs == ("expected_log_prob",) and not losses.POLICY_LOSSES["gpg"].has_ratio


def test_a_step_on_policy_has_reinforces_gradient_however_it_is_cut(trainer):
    found = []
    for flags in (CENTERED, CENTERED | {"max_tokens_per_micro_batch": 40}, CENTERED | {"score_centering": False}):
        trainer.begin_again()
        trainer.ticket = 0
        ((metrics, batch),) = trainer.steps(1, **flags)
        found.append((metrics["actor/grad_norm"], metrics["actor/pg_loss"], batch.support.shape[1]))
    (norm, loss, columns), (same, same_loss, _), (plain, other_loss, narrow) = found
    assert same == pytest.approx(norm, rel=1e-4) and same_loss == pytest.approx(loss, abs=1e-6) and columns == 2 * narrow
    assert norm == pytest.approx(plain, rel=1e-3) and abs(loss - other_loss) > 1e-4


def test_a_step_with_another_sampler_has_another_gradient(trainer, monkeypatch):
    """The same tokens, which other weights than the learner's sampled."""
    found = {}
    for centers in (True, False):
        trainer.begin_again()
        trainer.ticket = 0
        torch.manual_seed(0)
        noisy = [(name, w + 0.02 * torch.randn_like(w)) for name, w in trainer.learner.weights()]
        trainer.engine.update(iter(noisy), version=0)
        with monkeypatch.context() as patch:
            patch.setattr(trainer.engine, "update", lambda *_, **__: None)
            ((metrics, batch),) = trainer.steps(1, **CENTERED | {"score_centering": centers, "use_rollout_log_probs": True})
        found[centers] = metrics["actor/grad_norm"], batch.token
    assert torch.equal(found[True][1], found[False][1]) and abs(found[True][0] - found[False][0]) > 0.01 * found[True][0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"loss_mode": "ppo_clip"}, "takes the place of a ratio, and --loss-mode ppo_clip has one"),
        ({"rollout_is": "token"}, "takes the place of a ratio, and --rollout-is weighs tokens"),
        ({"keep_sampling_mask": False}, "Engines record it with --keep-sampling-mask --top-k K"),
    ],
)
def test_what_it_cannot_do_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        check(train_sync.Args(**CENTERED | flags))
    stale = parts.make(train_async.Args, **CENTERED, staleness_threshold=1.0, use_rollout_log_probs=False)
    check(stale)
    assert stale.policy_loss.has_ratio, "it is right for stale tokens without old log-probs"

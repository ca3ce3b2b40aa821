"""Which objective the gradient of a stale batch estimates without bias: the scripts' own `learn` trains a tabular policy on
every pair of responses, and the result is compared with exact gradients (benchmarks/learning/unbiased.py makes the table of
docs/algorithms.md). A teacher's is that of KL(policy || teacher)."""

import sys

import pytest
import torch
from helpers import ROOT

import losses
import train_async
import train_one_step_off
import train_sync

sys.path.append(str(ROOT / "benchmarks"))
from learning import unbiased

ONE, TWO = (3, 1, 1.0), (3, 2, 0.7)  # words, tokens, drift
SEQ_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}  # of one token: the same
WIDE = {
    "gspo": SEQ_MEAN,
    "gmpo": SEQ_MEAN | {"clip_ratio_low": 1e9},
    "decoupled_ppo": {"loss_args": ("cap=1e9",)},
    "dppo_tv": {"clip_ratio_c": 1e9},
    "dppo_kl": {"clip_ratio_c": 1e9, "clip_ratio_low": 1e9},
    "luspo": SEQ_MEAN,
}


pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture(autouse=True)
def fp64():
    with unbiased.in_fp64():
        yield


def plain(log_prob, old_log_prob, advantage, mask, seq):
    """A user's own loss, declared to have no ratio."""
    return -advantage * log_prob, {}


@pytest.fixture
def someones_own(monkeypatch):
    monkeypatch.setattr(losses, "POLICY_LOSSES", dict(losses.POLICY_LOSSES))
    losses.policy_loss(has_ratio=False)(plain)


@pytest.mark.parametrize(
    "loss", ["ppo_clip", "gspo", "luspo", "gmpo", "cispo", "reinforce", "gpg", "dppo_tv", "dppo_kl", "decoupled_ppo", "plain"]
)  # all whose gradient at the old policy is REINFORCE's, whatever the drift
@pytest.mark.parametrize("script", [train_one_step_off, train_async])
def test_by_default_a_stale_token_is_weighed_exactly(script, loss, someones_own):
    flags = {"loss_mode": loss} | WIDE.get(loss, {})
    error = unbiased.errors(flags, ONE, script)
    assert error["dJ"] < 1e-12 and error["surrogate"] < 1e-12


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "reinforce", "plain"])
def test_of_several_tokens_the_default_gives_the_surrogate_and_sequence_weights_the_true_gradient(loss, someones_own):
    error = unbiased.errors({"loss_mode": loss}, TWO)
    assert error["surrogate"] < 1e-12 and error["dJ"] > 0.05
    error = unbiased.errors({"loss_mode": loss, "rollout_is": "sequence", "rollout_is_threshold": "1e9"}, TWO)
    assert error["dJ"] < 1e-12 and error["surrogate"] > 0.05


def test_without_any_correction_the_gradient_is_neither():
    error = unbiased.errors({"use_rollout_log_probs": False}, ONE)
    assert error["dJ"] > 0.05 and error["surrogate"] > 0.05


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "plain"])
def test_the_second_update_of_a_batch_is_weighed_too(loss, someones_own):
    """In train_sync.py the generator's policy is the one before the first update, which changes the weights."""
    moved, start, score = unbiased.make_case(*ONE)
    policy, _, _ = unbiased.make_case(*ONE)
    policy.logits.data.copy_(start.logits.data)
    policy.moves_to = moved.logits.detach()
    found = unbiased.expected_gradient(train_sync, {"loss_mode": loss, "ppo_epochs": 2}, policy, start, score, update=1)
    assert torch.allclose(found, unbiased.exact_gradients(moved, start, score)["dJ"], atol=1e-12)


# ------------------------------------------------------------------------------------------------------------- a teacher

ALONE = {"teacher": "some model", "teacher_alone": True}


class Taught(unbiased.Tabular):
    """A policy in the learner's place, with a teacher of the same shape."""

    def __init__(self, policy: unbiased.Tabular, words: int, length: int):
        super().__init__(words, length, policy.logits.detach())
        self.teacher = unbiased.Tabular(
            words, length, torch.randn(policy.logits.shape, generator=torch.Generator().manual_seed(9))
        )

        self.teacher.targets_of = lambda *_: (self._taught(), None)

    def _taught(self) -> torch.Tensor:
        self.teacher.batch = self.batch
        return self.teacher.log_probs_of("policy")

    def kl_gradient(self, sampler: unbiased.Tabular) -> torch.Tensor:
        """Of the KL to the teacher behind every prefix, by whole distributions, weighed by how often `sampler` comes there."""
        reached = torch.zeros(len(self.logits))
        for sequence in sampler.sequences:
            log_prob = sampler.of(sequence).detach()
            for place in range(len(sequence)):
                reached[sampler.row[sequence[:place]]] += log_prob.sum().exp()  # summed over all that may follow
        log_p, log_t = self.logits.log_softmax(-1), self.teacher.logits.detach().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_t)).sum(-1)
        return torch.autograd.grad((reached * kl).sum(), self.logits)[0]


@pytest.mark.parametrize("case", [(3, 1, 1.0), (3, 2, 0.7)], ids=["1 token", "2 tokens"])
@pytest.mark.parametrize("script", [train_one_step_off, train_async])
@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "cispo"])
def test_the_gradient_of_stale_samples_is_that_of_the_kl(case, script, loss):
    """The expectation over all pairs of responses that another policy draws. With that policy's log-probs in the advantage it
    would be another one."""
    policy, sampler, score = unbiased.make_case(*case)
    policy = Taught(policy, *case[:2])
    found = unbiased.expected_gradient(script, ALONE | {"loss_mode": loss, "teacher_coef": 0.5}, policy, sampler, score)
    torch.testing.assert_close(found, -0.5 * policy.kl_gradient(sampler), atol=1e-12, rtol=0)


def test_next_to_a_reward_both_gradients_add_up():
    policy, sampler, score = unbiased.make_case(3, 1, 1.0)
    policy = Taught(policy, 3, 1)
    both = unbiased.expected_gradient(train_async, {"teacher": "some model", "teacher_coef": 2}, policy, sampler, score)
    of_reward = unbiased.exact_gradients(policy, sampler, score)["dJ"]
    torch.testing.assert_close(both, of_reward - 2 * policy.kl_gradient(sampler), atol=1e-12, rtol=0)


def test_from_itself_the_policy_learns_nothing():
    policy, _, score = unbiased.make_case(3, 2, 0.0)
    policy = Taught(policy, 3, 2)
    policy.teacher.logits = policy.logits.detach().clone()
    assert not unbiased.expected_gradient(train_sync, ALONE, policy, policy, score).any()


def test_the_docs_hold_rows_of_the_table_that_the_benchmark_made():
    made = (ROOT / "benchmarks" / "results" / "unbiased.md").read_text().splitlines()
    page = (ROOT / "docs" / "algorithms.md").read_text()
    head = made[0]
    shown = page[page.index(head) :].split("\n\n")[0].splitlines()
    assert len(shown) >= 7 and set(shown) <= set(made)

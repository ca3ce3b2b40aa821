"""A teacher in the learner: its top tokens, and the policy's gradient from them, are those of transformers."""

import numpy as np
import pytest
import torch
from helpers import SMALL, make_group
from transformers import AutoModelForCausalLM, Qwen2Config

import losses
from rl.algorithm.teacher import Teacher
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.learning.micro_batches import Tokens, micro_batches
from rl.model import policy

K, TEMPERATURE = 5, 0.7


pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """The teacher is larger, and has rows behind the vocabulary."""
    made = {}
    for seed, (name, more) in enumerate({"policy": {}, "teacher": {"vocab_size": 40, "hidden_size": 96}}.items()):
        torch.manual_seed(seed)
        made[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(Qwen2Config(**SMALL | more)).save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch.of([make_group(t, rng.integers(1, 9, 3), prompt=4, rng=rng, masked=True) for t in range(3)])


def by_transformers(models: dict[str, str], batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One response after the other, in double precision: the KL over the whole batch, its gradient, and the teacher's log-probs
    of the sampled tokens."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(models[name]).double() for name in ("policy", "teacher"))
    kl, sampled = 0.0, []
    rows = (x.split(batch.lengths.tolist()) for x in (batch.token, batch.mask))
    for prompt, tokens, mask in zip(batch.prompts, *rows, strict=True):
        row = torch.tensor([[*prompt.tolist(), *tokens.tolist()]])
        p, t = ((model(row).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).softmax(-1) for model in (student, teacher))
        sampled.append(t.detach().log()[torch.arange(len(tokens)), tokens.long()])
        for of_student, of_teacher, trained in zip(p, t.detach(), mask, strict=True):
            top = of_teacher[: SMALL["vocab_size"]].argsort(descending=True)[:K]
            pairs = [
                *zip(of_student[top], of_teacher[top], strict=True),
                (1 - of_student[top].sum(), 1 - of_teacher[top].sum()),
            ]
            kl = kl + sum(a * (a / b).log() for a, b in pairs) * trained
    kl.backward()
    return kl.detach(), torch.cat([p.grad.flatten() for p in student.parameters()]), torch.cat(sampled)


def taught(models: dict[str, str], ranks) -> Learner:
    learner = Learner(models["policy"], LearnerArgs(), ranks, 10, TEMPERATURE)
    learner.teacher = Teacher(learner.load_frozen(models["teacher"], "teacher"), K)
    return learner


@pytest.mark.parametrize("at_once", [policy.LOGITS_AT_ONCE, 64])
def test_kl_and_gradient_are_those_of_transformers(models, batch, ranks, monkeypatch, at_once):
    """Also where logits are computed two tokens at a time."""
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", at_once)
    learner = taught(models, ranks)
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), 40, ranks)
    batch.targets.teacher_log_prob, batch.targets.teacher_top = learner.teacher.read(learner, batch, [micros])
    total = 0.0
    for micro in micros:
        t = Tokens.of(batch, micro)
        out = learner.forward(micro, "none", t.teacher_top_token)
        assert out.log_prob.shape == t.mask.shape and int(t.teacher_top_token.max()) < SMALL["vocab_size"]
        loss = losses.top_k_reverse_kl(out.top_log_prob, t.teacher_top_log_prob, t.mask).sum()
        loss.backward()
        total += float(loss.detach())
    kl, gradient, sampled = by_transformers(models, batch)
    own = torch.cat([p.grad.flatten() for p in learner.policy.parameters()]).double()
    assert len(micros) > 1 and total == pytest.approx(float(kl), rel=1e-5)
    assert float((own - gradient).norm() / gradient.norm()) < 1e-5
    expected = torch.where(batch.mask, sampled, 0.0)  # tokens outside the mask are not computed
    torch.testing.assert_close(batch.targets.teacher_log_prob.double(), expected, atol=1e-5, rtol=1e-5)
    assert not any(p.requires_grad for p in learner.teacher.model.parameters())


def test_the_sampled_tokens_have_the_same_bits_with_and_without_top_tokens(models, batch, ranks):
    learner = taught(models, ranks)
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), 40, ranks)
    _, top = learner.teacher.read(learner, batch, [micros])
    for micro in micros:
        alone, with_top = (learner.forward(micro, "none", also).log_prob for also in (None, top.token[micro.index]))
        assert torch.equal(alone, with_top)

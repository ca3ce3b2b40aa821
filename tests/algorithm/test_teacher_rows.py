"""A teacher with prompts of its own: its log-probs and the policy's gradient are those of transformers, in rows of any size."""

import numpy as np
import pytest
import torch
from helpers import make_group, save_model
from transformers import AutoModelForCausalLM

import losses
import train_sync
from rl import parts
from rl.algorithm.teacher import Teacher, TeacherRows
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.learning.micro_batches import Tokens, micro_batches

K, TEMPERATURE = 5, 0.7
SIZES = [(3, 8, 5), (2, 7), (6, 1, 4)]


pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return {kind: save_model(kind, tmp_path_factory.mktemp(kind)) for kind in ("qwen2-untied", "qwen3_5", "moe")}


@pytest.fixture
def batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch.of([make_group(10 + t, sizes, prompt=4, rng=rng, masked=True) for t, sizes in enumerate(SIZES)])


def told(ticket: int, prompt: list[int]) -> list[int]:
    """The prompt with something in front; ticket 11's exceeds a micro-batch of 24 tokens."""
    return [ticket, *range(2, 2 + {10: 3, 11: 30, 12: 9}[ticket]), *prompt]


def taught(path: str, ranks, ids_of, top_k: int = K, **more) -> Learner:
    """A learner that is its own teacher."""
    learner = Learner(path, LearnerArgs(max_tokens_per_micro_batch=24, **more), ranks, 10, TEMPERATURE)
    learner.teacher = Teacher(learner.policy, top_k, TeacherRows(ids_of))
    return learner


def read(learner: Learner, batch: Batch, micros: list) -> tuple:
    return learner.teacher.read(learner, batch, [micros])


def by_transformers(path: str, batch: Batch, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One response after the other: the KL over the whole batch, its gradient, and the log-probs of the
    sampled tokens behind the teacher's prompts."""
    model, kl, sampled = AutoModelForCausalLM.from_pretrained(path).to(dtype), 0.0, []
    tickets = [10 + t for t, sizes in enumerate(SIZES) for _ in sizes]
    tokens, masks = (x.split(batch.lengths.tolist()) for x in (batch.token, batch.mask))
    for ticket, prompt, response, mask in zip(tickets, batch.prompts, tokens, masks, strict=True):
        distributions = []
        for front in (prompt.tolist(), told(ticket, prompt.tolist())):
            logits = model(torch.tensor([[*front, *response.tolist()]])).logits[0, len(front) - 1 : -1]
            distributions.append((logits / TEMPERATURE).softmax(-1))
        p, t = distributions[0], distributions[1].detach()
        sampled.append(t.log()[torch.arange(len(response)), response.long()])
        for of_policy, of_teacher, trained in zip(p, t, mask, strict=True):
            top = of_teacher.argsort(descending=True)[:K]
            rest = (1 - of_policy[top].sum(), 1 - of_teacher[top].sum())
            pairs = [*zip(of_policy[top], of_teacher[top], strict=True), rest]
            kl = kl + sum(a * (a / b).log() for a, b in pairs) * trained
    kl.backward()
    gradient = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()])
    return kl.detach(), gradient, torch.cat(sampled)


@pytest.mark.parametrize("kind", ["qwen2-untied", "qwen3_5"])
@pytest.mark.parametrize("budget", [24, 200])
def test_kl_and_gradient_are_those_of_transformers(models, batch, ranks, kind, budget):
    """Also where one of the teacher's prompts alone exceeds a micro-batch."""
    learner = taught(models[kind], ranks, told)
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), budget, ranks)
    batch.targets.teacher_log_prob, batch.targets.teacher_top = read(learner, batch, micros)
    total = 0.0
    for micro in micros:
        t = Tokens.of(batch, micro)
        out = learner.forward(micro, also=t.teacher_top_token)
        loss = losses.top_k_reverse_kl(out.top_log_prob, t.teacher_top_log_prob, t.mask).sum()
        loss.backward()
        total += float(loss.detach())
    kl, gradient, sampled = by_transformers(models[kind], batch)
    own = torch.cat([p.grad.flatten() for p in learner.policy.parameters()]).double()
    assert total == pytest.approx(float(kl), rel=1e-5)
    assert float((own - gradient).norm() / gradient.norm()) < 1e-5
    expected = torch.where(batch.mask, sampled, 0.0)
    torch.testing.assert_close(batch.targets.teacher_log_prob.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top_k", [0, K])
def test_with_the_policys_prompts_it_is_a_teacher_without_prompts(models, batch, ranks, top_k):
    """To the bit, also as another model with the same weights."""
    path = models["qwen2-untied"]
    learner = taught(path, ranks, lambda ticket, prompt: prompt, top_k)
    other = Learner(path, LearnerArgs(), ranks, 10, TEMPERATURE)
    other.teacher = Teacher(other.load_frozen(path, "teacher"), top_k)
    found = []
    for each in (learner, other):
        micros = micro_batches(batch, torch.arange(len(batch.lengths)), 24, ranks)
        log_prob, top = read(each, batch, micros)
        found.append([log_prob, top.token, top.log_prob] if top_k else [log_prob])
    assert found[0][0].any() and all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_mixtures_routes_are_the_teachers_own(models, batch, ranks):
    """With --router-replay the policy replays recorded ones, which belong to other prompts."""
    learner = taught(models["moe"], ranks, told, top_k=0, router_replay="R2")
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), 24, ranks)
    before = read(learner, batch, micros)[0]
    learner.log_probs_of("policy", batch, [micros])
    assert all(micro.routes is not None for micro in micros)
    for micro in micros:
        micro.routes = torch.zeros_like(micro.routes)  # as if the first expert were always wanted
    assert torch.equal(read(learner, batch, micros)[0], before)
    expected = by_transformers(models["moe"], batch, torch.float32)[2]
    torch.testing.assert_close(before, torch.where(batch.mask, expected, 0.0), atol=1e-5, rtol=1e-5)


def test_the_teacher_moves_with_the_policy(models, batch, ranks):
    learner = taught(models["qwen2-untied"], ranks, told, top_k=0)
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), 24, ranks)
    before = read(learner, batch, micros)[0]
    with torch.no_grad():
        next(learner.policy.parameters()).mul_(1.5)
    assert not torch.allclose(read(learner, batch, micros)[0], before)


def test_adapters_are_switched_off_for_the_model_that_they_change(models, batch, ranks):
    path = models["qwen2-untied"]
    learner, plain = (Learner(path, LearnerArgs(lora_rank=rank), ranks, 10, TEMPERATURE) for rank in (2, 0))
    args = parts.make(train_sync.Args, teacher=path, teacher_top_k=K)
    for each in (learner, plain):
        each.teacher = Teacher.of(args, None, each)
    with torch.no_grad():
        for name, parameter in learner.policy.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    found = []
    for each in (learner, plain):
        micros = micro_batches(batch, torch.arange(len(batch.lengths)), 200, ranks)
        found.append(read(each, batch, micros)[0])
        own = each.log_probs_of("policy", batch, [micros])
    torch.testing.assert_close(*found)
    assert not torch.allclose(learner.log_probs_of("policy", batch, [micros]), own)
    assert not isinstance(learner.teacher.model, torch.nn.Module)  # no second copy


def test_a_prompt_is_asked_for_once_a_group_and_by_its_ticket(models, batch, ranks):
    asked = []

    def told_once(ticket: int, prompt: list[int]) -> list[int]:
        asked.append((ticket, prompt))
        return told(ticket, prompt)

    learner = taught(models["qwen2-untied"], ranks, told_once, top_k=0)
    micros = micro_batches(batch, torch.arange(len(batch.lengths)), 24, ranks)
    read(learner, batch, micros)[0]
    firsts = [batch.prompts[int((batch.group == g).nonzero()[0])].tolist() for g in range(3)]
    assert asked == list(zip((10, 11, 12), firsts, strict=True))

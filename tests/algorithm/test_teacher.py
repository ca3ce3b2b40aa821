"""A teacher: its log-probs and top tokens, and the gradient from them, are those of transformers: another model, or the policy
itself with prompts of its own, in rows of any size. What cannot teach is refused. test_unbiased.py has stale samples."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import SMALL, flat_gradient, log_distributions, make_group, relative, save_model
from transformers import AutoModelForCausalLM, Qwen2Config

import losses
import train_sync
from rl import parts
from rl.algorithm.metrics import Fates
from rl.algorithm.teacher import Teacher, check_teacher
from rl.errors import UserError
from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, Tokens, micro_batches
from rl.learning.learner import Learner
from rl.model import policy
from rl.ranges import check

K, TEMPERATURE = 5, 0.7
SIZES = [(3, 8, 5), (2, 7), (6, 1, 4)]
TICKETS = [10 + t for t, sizes in enumerate(SIZES) for _ in sizes]

pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """`another` is larger, and has rows behind the vocabulary."""
    made = {kind: save_model(kind, tmp_path_factory.mktemp(kind)) for kind in ("qwen2-untied", "qwen3_5", "moe")}
    made["another"] = str(tmp_path_factory.mktemp("another"))
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(Qwen2Config(**SMALL | {"vocab_size": 40, "hidden_size": 96})).save_pretrained(
        made["another"]
    )
    return made


@pytest.fixture
def batch() -> Batch:
    rng = np.random.default_rng(0)
    return Batch.of([make_group(10 + t, sizes, prompt=4, rng=rng, masked=True) for t, sizes in enumerate(SIZES)])


def told(ticket: int, prompt: list[int]) -> list[int]:
    """The prompt with something in front; ticket 11's exceeds a micro-batch of 24 tokens."""
    return [ticket, *range(2, 2 + {10: 3, 11: 30, 12: 9}[ticket]), *prompt]


def taught(path: str, ranks, ids_of=None, top_k: int = K, teacher: str = "", **more) -> Learner:
    """A learner with another model as its teacher, or with itself."""
    learner = Learner(path, LearnerArgs(max_tokens_per_micro_batch=24, **more), ranks, 10, TEMPERATURE)
    if teacher:
        learner.teacher = Teacher(learner.load_frozen(teacher, "teacher"), top_k)
    else:
        learner.teacher = Teacher(learner.policy, top_k, ids_of)
    return learner


def micros_of(batch: Batch, ranks, budget: int = 24) -> list:
    return micro_batches(batch, torch.arange(len(batch.lengths)), budget, ranks)


def read(learner: Learner, batch: Batch, micros: list) -> tuple:
    return learner.teacher.targets_of(learner, batch, [micros])


def by_transformers(path: str, teacher: str, fronts, batch: Batch, dtype=torch.float64) -> tuple:
    """One response after the other: the KL over the whole batch, its gradient, and the teacher's log-probs of the sampled
    tokens."""
    model, other = (AutoModelForCausalLM.from_pretrained(of).to(dtype) for of in (path, teacher))
    kl, sampled = 0.0, []
    tokens, masks = (x.split(batch.lengths.tolist()) for x in (batch.token, batch.mask))
    of_policy = log_distributions(lambda ids: model(ids).logits, batch, TEMPERATURE)
    of_teacher = log_distributions(lambda ids: other(ids).logits, batch, TEMPERATURE, fronts)
    for log_p, log_t, response, mask in zip(of_policy, of_teacher, tokens, masks, strict=True):
        p, t = log_p.exp(), log_t.detach().exp()
        sampled.append(log_t.detach()[torch.arange(len(response)), response.long()])
        for own, theirs, trained in zip(p, t, mask, strict=True):
            top = theirs[: SMALL["vocab_size"]].argsort(descending=True)[:K]
            pairs = [*zip(own[top], theirs[top], strict=True), (1 - own[top].sum(), 1 - theirs[top].sum())]
            kl = kl + sum(a * (a / b).log() for a, b in pairs) * trained
    kl.backward()
    return kl.detach(), flat_gradient(model), torch.cat(sampled)


def fronts_of(batch: Batch) -> list[list[int]]:
    return [told(ticket, prompt.tolist()) for ticket, prompt in zip(TICKETS, batch.prompts, strict=True)]


CASES = {  # policy, teacher, tokens of a micro-batch, logits at once
    "itself": ("qwen2-untied", "", 24, None),
    "itself, in one row": ("qwen2-untied", "", 200, None),
    "itself, a delta net": ("qwen3_5", "", 24, None),
    "another model": ("qwen2-untied", "another", 40, None),
    "another model, logits of two tokens at a time": ("qwen2-untied", "another", 40, 64),
}


@pytest.mark.parametrize("case", CASES)
def test_kl_and_gradient_are_those_of_transformers(models, batch, ranks, monkeypatch, case):
    """Also where one of the teacher's prompts alone exceeds a micro-batch."""
    kind, teacher, budget, at_once = CASES[case]
    monkeypatch.setattr(policy, "LOGITS_AT_ONCE", at_once or policy.LOGITS_AT_ONCE)
    learner = taught(models[kind], ranks, told, teacher=teacher and models[teacher])
    micros = micros_of(batch, ranks, budget)
    batch.targets.teacher_log_prob, batch.targets.teacher_top = read(learner, batch, micros)
    total = 0.0
    for micro in micros:
        t = Tokens.of(batch, micro)
        out = learner.forward(micro, also=t.teacher_top_token)
        assert at_once or torch.equal(out.log_prob, learner.forward(micro).log_prob), "the top tokens change no bit"
        assert out.log_prob.shape == t.mask.shape and int(t.teacher_top_token.max()) < SMALL["vocab_size"]
        loss = losses.top_k_reverse_kl(out.top_log_prob, t.teacher_top_log_prob, t.mask).sum()
        loss.backward()
        total += float(loss.detach())
    fronts = None if teacher else fronts_of(batch)
    kl, gradient, sampled = by_transformers(models[kind], models[teacher or kind], fronts, batch)
    assert total == pytest.approx(float(kl), rel=1e-5) and (len(micros) > 1 or budget == 200)
    assert relative(flat_gradient(learner.policy), gradient) < 1e-5
    expected = torch.where(batch.mask, sampled, 0.0)  # tokens outside the mask are not computed
    torch.testing.assert_close(batch.targets.teacher_log_prob.double(), expected, atol=1e-5, rtol=1e-5)
    assert not teacher or not any(p.requires_grad for p in learner.teacher.model.parameters())


@pytest.mark.parametrize("top_k", [0, K])
def test_with_the_policys_prompts_it_is_a_teacher_without_prompts(models, batch, ranks, top_k):
    """To the bit, also as another model with the same weights."""
    path = models["qwen2-untied"]
    found = []
    for each in (taught(path, ranks, lambda ticket, prompt: prompt, top_k), taught(path, ranks, top_k=top_k, teacher=path)):
        log_prob, top = read(each, batch, micros_of(batch, ranks))
        found.append([log_prob, top.token, top.log_prob] if top_k else [log_prob])
    assert found[0][0].any() and all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_mixtures_routes_are_the_teachers_own(models, batch, ranks):
    """With --router-replay the policy replays recorded ones, which belong to other prompts."""
    learner, micros = taught(models["moe"], ranks, told, top_k=0, router_replay="R2"), micros_of(batch, ranks)
    before = read(learner, batch, micros)[0]
    learner.log_probs_of("policy", batch, [micros])
    assert all(micro.routes is not None for micro in micros)
    for micro in micros:
        micro.routes = torch.zeros_like(micro.routes)  # as if the first expert were always wanted
    assert torch.equal(read(learner, batch, micros)[0], before)
    expected = by_transformers(models["moe"], models["moe"], fronts_of(batch), batch, torch.float32)[2]
    torch.testing.assert_close(before, torch.where(batch.mask, expected, 0.0), atol=1e-5, rtol=1e-5)


def test_it_moves_with_the_policy_and_is_asked_once_a_group_by_its_ticket(models, batch, ranks):
    asked = []

    def told_once(ticket: int, prompt: list[int]) -> list[int]:
        asked.append((ticket, prompt))
        return told(ticket, prompt)

    learner, micros = taught(models["qwen2-untied"], ranks, told_once, top_k=0), micros_of(batch, ranks)
    before = read(learner, batch, micros)[0]
    firsts = [batch.prompts[int((batch.group == g).nonzero()[0])].tolist() for g in range(3)]
    assert asked == list(zip((10, 11, 12), firsts, strict=True))
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
    micros = micros_of(batch, ranks, 200)
    torch.testing.assert_close(*(read(each, batch, micros)[0] for each in (learner, plain)))
    adapted, own = (each.log_probs_of("policy", batch, [micros]) for each in (learner, plain))
    assert not torch.allclose(adapted, own)
    assert not isinstance(learner.teacher.model, torch.nn.Module)  # no second copy


def test_a_step_whose_scores_are_all_equal_has_a_signal_from_its_teacher():
    batch = Batch.of([make_group(0, (3, 2), score=1.0)])
    batch.targets.advantage = torch.zeros(5)
    assert not Fates.of(batch).has_signal
    batch.targets.teacher_log_prob = torch.zeros(5)
    assert Fates.of(batch).has_signal


# --------------------------------------------------------------------------------------------------------- the top tokens


def coarse_kl(logits: torch.Tensor, teacher: torch.Tensor, k: int) -> torch.Tensor:
    """KL of two whole distributions [n, V], all but the teacher's k likeliest tokens taken as one."""
    out = []
    for p, t in zip(logits.softmax(-1), teacher.softmax(-1), strict=True):
        order = t.argsort(descending=True)
        parts = [(p[i], t[i]) for i in order[:k]] + [(p[order[k:]].sum(), t[order[k:]].sum())]
        out.append(sum(a * (a / b).log() for a, b in parts))
    return torch.stack(out)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_top_tokens_give_the_kl_of_the_coarser_distributions(k):
    rng = torch.Generator().manual_seed(k)
    logits, teacher = (torch.randn(5, 8, generator=rng, dtype=torch.float64) * 2 for _ in range(2))
    weight, mask = torch.randn(5, generator=rng, dtype=torch.float64), torch.tensor([True, True, False, True, True])
    mine, exact = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    values, tokens = teacher.log_softmax(-1).topk(k, -1)
    log_prob = mine.log_softmax(-1).gather(1, tokens)
    with torch.no_grad():
        log_prob[2] = -torch.inf
        values[2] = torch.nan
    loss = losses.top_k_reverse_kl(log_prob, values, mask)
    (loss * weight).sum().backward()
    kl = coarse_kl(exact, teacher, k)
    (kl * weight * mask).sum().backward()
    torch.testing.assert_close(loss.detach(), kl.detach() * mask, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(mine.grad[mask], exact.grad[mask], atol=1e-12, rtol=1e-10)
    assert not mine.grad[2].any()


def test_the_top_tokens_of_itself_give_exactly_nothing():
    """In fp32, and where hardly any mass is left for the other tokens."""
    logits = (torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 8).requires_grad_()
    log_prob = logits.log_softmax(-1).topk(4, -1).values
    loss = losses.top_k_reverse_kl(log_prob, log_prob.detach().clone(), torch.ones(64, dtype=torch.bool))
    loss.sum().backward()
    assert not loss.any() and not logits.grad.any()


# ------------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"loss_mode": "gmpo"}, "--loss-mode gmpo averages it over the response"),
        ({"loss_mode": "kl_cov"}, "--loss-mode kl_cov chooses tokens before it is known"),
        ({"teacher_alone": True, "filter_groups": True}, "do not count with --teacher-alone"),
        ({"teacher_alone": True, "adv_estimator": "remax"}, "--adv-estimator remax compares scores with baseline"),
        ({"adv_estimator": "rloo", "rollout_n": 1}, "nothing is learnt"),
        ({"teacher_alone": True, "teacher": None}, "--teacher-alone: without --teacher"),
        ({"teacher_alone": False, "teacher_top_k": 1, "teacher": None}, "--teacher-top-k: without --teacher"),
        ({"teacher": "self"}, "from its own prompt the policy learns nothing. Add --teacher-prompt"),
        ({"teacher_prompt": "Think."}, "is the same for all rows"),
        ({"teacher_prompt": ""}, "--teacher-prompt: its value is empty"),
        ({"teacher_prompt": "{prompt}", "agent": "true"}, "--teacher-prompt with --agent"),
        ({"teacher_prompt": "{prompt}", "serve_policy": "8000"}, "--teacher-prompt with --serve-policy"),
    ],
)
def test_flags_that_a_teacher_makes_meaningless_are_refused(flags, said):
    with pytest.raises(UserError, match=said):
        check(parts.make(train_sync.Args, **{"teacher": "some model"} | flags))


def test_a_teacher_needs_the_policys_vocabulary(demo_model, tmp_path):
    """Two tokens have changed places: sizes are the same. Rows behind the vocabulary, as Qwen2.5's larger models have, do not
    matter."""
    other, args = Path(shutil.copytree(demo_model, tmp_path / "other")), parts.make(train_sync.Args, teacher="other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 8}))
    check_teacher(str(other), args, demo_model)
    with pytest.raises(UserError, match="Take fewer"):
        check_teacher(str(other), parts.replace(args, teacher_top_k=10_000), demo_model)
    swapped = Path(shutil.copytree(demo_model, tmp_path / "swapped"))
    tokenizer = json.loads((swapped / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]
    (swapped / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"--teacher .*: its tokenizer is not that of --model .*: 2 tokens differ, such as '3'"):
        check_teacher(str(swapped), args, demo_model)
    with pytest.raises(UserError, match=r"--teacher .*nowhere: no model can be read there"):
        check_teacher(str(tmp_path / "nowhere"), args, demo_model)

"""A teacher: its top tokens give the KL of the coarser distributions, and what cannot teach is refused. test_unbiased.py has
the gradient."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import make_group

import losses
import train_sync
from rl import parts
from rl.algorithm.metrics import Fates
from rl.algorithm.teacher import check_teacher
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.ranges import check


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

"""The critic: what it gives V of, its part of a step by hand, on several learners, and in a checkpoint."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import demo, make_group, whole
from transformers import AutoModelForCausalLM

import train_sync
from rl import parts
from rl.algorithm.critic import check_critic, explained_variance
from rl.errors import UserError
from rl.learning.batch import Batch, micro_batches
from rl.ranges import check
from rl.ranks.timers import Timers
from rl.setup import make_learner


def make_args(model: str, **flags) -> train_sync.Args:
    fixed = {"adv_estimator": "gae", "train_batch_size": 4, "max_prompt_length": 12, "max_response_length": 20}
    args = parts.make(
        train_sync.Args, **{"model": model, "lr_warmup_steps": 0, "max_tokens_per_micro_batch": 64} | fixed | flags
    )
    check(args)
    return args


def learner_of(args: train_sync.Args, ranks):
    return make_learner(args, SimpleNamespace(path=args.model, total_steps=10), ranks)


def batch_of(seed: int = 0) -> Batch:
    """Four prompts with three responses each, which have tokens that are not trained, and random scores."""
    rng = np.random.default_rng(seed)
    sizes = [[int(n) for n in rng.integers(2, 20, 3)] for _ in range(4)]
    return Batch.of([make_group(t, n, prompt=int(rng.integers(1, 12)), rng=rng, masked=True) for t, n in enumerate(sizes)])


@torch.no_grad()
def draw_head(learner, seed: int = 0) -> torch.Tensor:
    """Gives the critic an output: zeros, as it begins with, say nothing of what it looks at."""
    head = learner.critic.policy.model.value_head
    return head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture(scope="module", params=["qwen2-tied", "qwen3"])
def model(request, models):
    return models[request.param]


def test_a_value_is_of_what_comes_before_the_token(model, ranks):
    """By transformers, one response at a time: a product with the hidden state that predicts the token, neither the one before
    nor the token's own. Without a head it is 0; of tokens outside the mask there is none."""
    learner, batch = learner_of(make_args(model), ranks), batch_of()
    micros = [micro_batches(batch, torch.arange(12), 64, ranks)]
    assert len(micros[0]) > 1 and not batch.mask.all()
    assert not learner.critic.values_of(batch, micros).any()
    head = draw_head(learner)
    found = learner.critic.values_of(batch, micros)
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").double()
    for i, prompt in enumerate(batch.prompts):
        tokens = batch.token[batch.seq == i].tolist()
        with torch.no_grad():
            states = plain.model(torch.tensor([[*prompt.tolist(), *tokens]]))[0][0]
        expected = states[len(prompt) - 1 : -1] @ head.double()
        of_mask = batch.mask[batch.seq == i]
        torch.testing.assert_close(found[batch.seq == i].double()[of_mask], expected[of_mask], atol=1e-4, rtol=1e-4)
        assert not found[batch.seq == i][~of_mask].any()


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_a_step_by_hand(model, ranks, lam):
    """Returns, advantages, the critic's loss over all trained tokens, and its one step of AdamW; the policy learns, too."""
    args = make_args(model, lam=lam, critic_lr=1e-2, lr=1e-3, grad_clip=1e9, weight_decay=0.0, cliprange_value=0.01)
    learner, batch = learner_of(args, ranks), batch_of()
    draw_head(learner)
    parameters = dict(learner.critic.policy.model.named_parameters())
    before = {name: whole(p).clone() for name, p in parameters.items()}
    policy = {name: whole(p).clone() for name, p in learner.parameters.items()}
    metrics = train_sync.learn(args, learner, batch, Timers())
    value, returns = batch.targets.value, batch.targets.returns
    of_policy = torch.zeros_like(returns)
    for i in range(12):
        mine = (batch.seq == i) & batch.mask
        given, score = value[mine].tolist(), float(batch.score[i])  # the score comes at the response's end
        expected = [score] * len(given) if lam == 1 else [*given[1:], score]
        assert returns[mine].tolist() == pytest.approx(expected, abs=1e-5)
        of_policy[mine] = torch.tensor(expected)
    difference = (of_policy - value)[batch.mask].double()
    expected = (difference - difference.mean()) / difference.std()
    torch.testing.assert_close(batch.targets.advantage[batch.mask].double(), expected, atol=1e-4, rtol=1e-4)
    errors = ((returns - value)[batch.mask].double() ** 2).numpy()
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 * errors.mean(), rel=1e-5)
    explained = 1 - errors.mean() / returns[batch.mask].double().numpy().var()
    assert metrics["critic/vf_explained_var"] == pytest.approx(explained, rel=1e-4)
    assert metrics["critic/vpred_mean"] == pytest.approx(float(value[batch.mask].mean()), rel=1e-4)
    assert metrics["critic/lr"] == 1e-2 and metrics["actor/lr"] == 1e-3
    for name, parameter in parameters.items():  # the first step of AdamW moves by the rate, whatever the gradient
        moved = (whole(parameter) - before[name]).abs()
        assert 0 < moved.max() <= 1.001e-2, name
    assert any(not torch.equal(whole(p), policy[name]) for name, p in learner.parameters.items())


def test_the_critic_and_its_clip_are_of_the_values_before_the_update(model, ranks):
    """Further passes over the batch compare with the first values: of most tokens the clip removes the gradient."""
    args = make_args(model, critic_lr=1e-2, critic_ppo_epochs=4, cliprange_value=1e-4)
    learner, batch = learner_of(args, ranks), batch_of()
    metrics = train_sync.learn(args, learner, batch, Timers())
    assert not batch.targets.value.any()
    assert 0.2 < metrics["critic/vf_clipfrac"] < 0.75, "none in the first pass of four"


def test_in_the_warm_up_the_critic_alone_learns_and_a_resume_continues_it(models, ranks):
    args = make_args(models["qwen2-tied"], critic_warmup=3, lr_warmup_steps=2, lr=1e-3, ppo_epochs=2)

    def steps(learner, numbers) -> list[dict]:
        return [train_sync.learn(args, learner, batch_of(number), Timers()) for number in numbers]

    learner, resumed = (learner_of(args, ranks) for _ in range(2))
    first = {name: whole(p).clone() for name, p in learner.parameters.items()}
    steps(learner, [1, 2])
    assert all(torch.equal(whole(p), first[name]) for name, p in learner.parameters.items())
    assert any(x.any() for name, x in learner.state_tensors().items() if name.startswith("critic.exp_avg."))
    saved = {name: tensor.clone() for name, tensor in learner.state_tensors().items()}
    state = learner.state()
    assert state["adam_step"] == 0 and state["critic"]["adam_step"] == 2
    for name, tensor in resumed.state_tensors().items():
        tensor.copy_(saved[name])
    resumed.restore(state, None)
    ours, theirs = steps(learner, [3, 4, 5]), steps(resumed, [3, 4, 5])
    assert ours == theirs
    assert [row["actor/lr"] for row in ours[1:]] == [5e-4, 1e-3], "the policy's rate begins after the warm-up"
    for name, tensor in learner.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name]), name
    assert any(not torch.equal(whole(p), first[name]) for name, p in learner.parameters.items())


def test_a_step_without_a_score_changes_neither_critic_nor_policy(models, ranks, monkeypatch):
    args = make_args(models["qwen2-tied"], lr_warmup_steps=2, lr=1e-3)
    learner = learner_of(args, ranks)
    rates = []
    for number, has_signal in enumerate([True, False, False, True], 1):
        before = {name: tensor.clone() for name, tensor in learner.state_tensors().items()}
        monkeypatch.setattr(Batch, "is_unscored", not has_signal)
        metrics = train_sync.learn(args, learner, batch_of(number), Timers())
        rates.append(metrics["critic/lr"] / args.critic.critic_lr)
        moved = any(not torch.equal(tensor, before[name]) for name, tensor in learner.state_tensors().items())
        assert moved == has_signal
        assert metrics["critic/grad_norm"] > 0
    assert rates == [0.5, 1.0, 1.0, 1.0] and metrics["critic/updated_steps"] == metrics["actor/updated_steps"] == 2


def test_explained_variance_sees_a_constant_error_and_equal_returns():
    batch = batch_of()
    batch.targets.returns = torch.where(batch.mask, torch.randn(len(batch.token)), torch.nan)
    batch.targets.value = batch.targets.returns.clone()
    assert explained_variance(batch) == 1
    batch.targets.value = batch.targets.value + 3
    assert explained_variance(batch) < -5, "verl's is 1 here"
    batch.targets.value = torch.full_like(batch.targets.value, float(batch.targets.returns[batch.mask].mean()))
    assert explained_variance(batch) == pytest.approx(0, abs=1e-6)
    batch.targets.returns = torch.ones(len(batch.token))
    assert explained_variance(batch) == 0


def test_a_critic_with_another_vocabulary_or_images_is_refused(models):
    args = parts.make(train_sync.Args, adv_estimator="gae", critic_model="x")
    with pytest.raises(UserError, match=r"^--critic-model .*tokenizer is not that of --model .*A critic reads"):
        check_critic(demo("demo-vl"), args, demo("demo"))
    with pytest.raises(UserError, match="cannot have a critic here"):
        check_critic(demo("demo-vl"), parts.make(train_sync.Args, adv_estimator="gae"), demo("demo-vl"))

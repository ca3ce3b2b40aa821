"""The algorithm's flags: what cannot be combined is refused with the reason, and each flag has its documented effect."""

import losses_reference as slow
import pytest
import torch
from helpers import make_group
from trainer import learn_and_report

import losses
import train_async
import train_one_step_off
import train_sync
from rl import parts
from rl.algorithm import whole_batch
from rl.errors import UserError
from rl.learning.batch import Batch, MicroBatch, Tokens
from rl.learning.learner import Forward, Learner
from rl.ranges import check
from rl.ranks.timers import Timers

PACKED = ("lp", "old", "advantage", "mask", "seq")
GEOMETRIC = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
LOSSES = [name for name, f in losses.POLICY_LOSSES.items() if name == f.function.__name__]


@pytest.mark.parametrize("script", [train_sync, train_one_step_off, train_async], ids=lambda script: script.__name__)
def test_the_kl_that_is_reported_is_positive_where_tokens_became_less_likely(script):
    """Old log-prob minus new, as in verl and TRL."""
    batch = Batch.of([make_group(0, [3, 4])])
    batch.targets.old_log_prob, batch.targets.advantage = batch.rollout_log_prob, torch.ones(7)
    t = Tokens.of(batch, MicroBatch.of(batch, [0, 1], torch.device("cpu")))
    out = Forward(t.old_log_prob - 0.25, torch.zeros(7))
    _, stats = script.actor_loss(parts.make(script.Args), t, out, 7.0)
    torch.testing.assert_close(stats["ppo_kl"], torch.full((7,), 0.25))


@pytest.mark.slow
def test_remax_compares_with_the_greedy_response(trainer):
    (_, batch), *_ = trainer.steps(2, adv_estimator="remax")
    assert set(batch.baseline.tolist()) <= {0.0, 1.0}
    expected = (batch.score - batch.baseline)[batch.seq]
    assert torch.equal(batch.targets.advantage, expected) and len(batch.score) == 16, (
        "the greedy response itself is not trained"
    )
    assert all(len(set(batch.baseline[batch.group == g].tolist())) == 1 for g in range(4))


def test_filter_groups_keeps_groups_with_a_signal(trainer):
    for metrics, batch in trainer.steps(4, filter_groups=True, max_num_gen_batches=50):
        scores = [set(batch.score[batch.group == g].tolist()) for g in range(4)]
        assert all(len(s) > 1 for s in scores) and metrics["train/filled_groups"] == 0
        assert (metrics["train/num_gen_batches"] > 1) == (metrics["train/filtered_groups"] > 0)


def test_filter_groups_gives_up_at_its_cap(trainer):
    """Responses are greedy, so all of a group are the same and have the same score."""
    start = trainer.ticket
    ((metrics, batch),) = trainer.steps(1, filter_groups=True, rollout_n=2, top_k=1, max_num_gen_batches=3)
    assert metrics["train/num_gen_batches"] == 3 and metrics["train/filtered_groups"] == 12
    assert metrics["train/filled_groups"] == 4 and len(batch.score) == 8 and trainer.ticket == start + 12


def test_responses_count_alike_in_the_kl_that_is_reported_however_long_they_are():
    """verl does the same. Responses without a trained token do not count."""
    batch = Batch.of([make_group(0, [1, 9, 4], masked=True), make_group(1, [30, 2]), make_group(2, [3], unscored=(0,))])
    batch.mask[batch.seq == 2] = False
    kl = torch.rand(len(batch.seq), generator=torch.Generator().manual_seed(0))
    trained = [kl[(batch.seq == i) & batch.mask] for i in range(5)]
    means = [float(x.mean()) for x in trained if len(x)]
    assert len(means) == 4 and whole_batch.mean_of_responses(kl, batch) == pytest.approx(sum(means) / 4)
    batch.mask[:] = False
    assert whole_batch.mean_of_responses(kl, batch) == 0


def test_kl_in_the_reward(trainer):
    """After some training the policy differs from the reference: the KL is charged."""
    trainer.steps(3, lr=1e-3)
    flags = {"kl_reward_type": "k3", "kl_reward_coef": 0.5}
    ((metrics, batch),) = trainer.steps(1, **flags)
    kl = losses.kl_penalty(batch.targets.old_log_prob, batch.targets.ref_log_prob, batch.mask, "k3")
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(whole_batch.mean_of_responses(kl, batch)) and kl.mean() > 0
    assert torch.allclose(batch.targets.reward, whole_batch.token_reward(batch) - 0.5 * kl)
    assert metrics["critic/rewards/mean"] < metrics["critic/score/mean"]
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5


@pytest.mark.parametrize("mode", losses.AGGREGATIONS)
def test_the_terms_of_the_loss_are_reported_as_the_loss_aggregates_them(trainer, mode, monkeypatch):
    """As in verl: each term is averaged over an optimizer step's mini-batch, then over the steps."""
    monkeypatch.setattr(trainer.learner, "step", lambda: trainer.learner.optimizer.zero_grad() or {"actor/grad_norm": 0.0})
    flags = {"loss_agg_mode": mode, "ppo_mini_batch_size": 2, "adv_estimator": "remax"}
    flags |= {"entropy_coeff": 0.5, "kl_loss_coef": 0.25, "max_tokens_per_micro_batch": 100}
    for _ in range(20):  # until advantages do not cancel
        ((metrics, batch),) = trainer.steps(1, **flags)
        means = []
        for part in (batch.group < 2, batch.group >= 2):
            tokens = part[batch.seq]
            loss, seq = (-batch.targets.advantage[tokens]).tolist(), batch.seq[tokens].tolist()  # the ratio is 1
            means.append(slow.aggregate(loss, [True] * len(loss), seq, mode, 8, trainer.args.sampling.max_response_length))
        if any(means):
            break
    assert metrics["actor/pg_loss"] == pytest.approx(sum(means) / 2, rel=1e-4, abs=1e-6) and any(means)
    whole = metrics["actor/pg_loss"] - 0.5 * metrics["actor/entropy"] + 0.25 * metrics["actor/kl_loss"]
    assert metrics["actor/loss"] == pytest.approx(whole, rel=1e-4, abs=1e-6) and metrics["actor/entropy"] > 0


@pytest.mark.parametrize("updates", [1, 2])
def test_log_probs_that_an_update_gives_need_no_pass(trainer, demo_model, monkeypatch, updates):
    """The first update computes its own old log-probs. Weights and all metrics equal bit for bit those with an extra pass."""
    flags = {"max_tokens_per_micro_batch": 100, "lr": 1e-3, "use_rollout_log_probs": updates > 1}
    args = parts.replace(trainer.args, **flags, ppo_mini_batch_size=4 // updates)
    assert not args.recompute_old_log_probs(updates)
    results = []
    for recompute in (False, True):
        monkeypatch.setattr(train_sync.Args, "recompute_old_log_probs", lambda *_, value=recompute: value)
        learner = Learner(demo_model, args.learner, trainer.ranks, 10**6)
        trainer.engine.update(learner.weights(), version=0)
        batch = Batch.of(train_sync.make_batch(args, trainer.generator(args), 0)[0])
        metrics = learn_and_report(args, learner, batch)
        results.append((metrics, batch, dict(learner.weights())))
    (metrics, batch, weights), (metrics_with, batch_with, weights_with) = results
    known = (batch.group < 4 // updates)[batch.seq]
    assert known.any() and torch.equal(batch.targets.actor_log_prob.isnan(), ~known)
    assert torch.equal(batch.targets.actor_log_prob[known], batch_with.targets.actor_log_prob[known])
    if updates == 1:
        assert metrics == metrics_with and batch.targets.old_log_prob is None
    else:
        assert metrics.keys() == metrics_with.keys() and 0 < metrics["training/rollout_probs_diff_max"] < 1e-4
    assert all(torch.equal(weight, weights_with[name]) for name, weight in weights.items())


def test_where_old_log_probs_come_from():
    """The generator gives them if batches may be stale and no feature compares both sides. Otherwise the learner computes
    them."""
    stale = (train_async.Args(), train_one_step_off.Args())
    stale = (*stale, parts.make(train_async.Args, staleness_threshold=0, publish_every=2))
    fresh = (train_sync.Args(), parts.make(train_async.Args, staleness_threshold=0))
    assert all(args.old_is_rollout for args in stale) and not any(args.old_is_rollout for args in fresh)
    compares = ({"rollout_is": "token"}, GEOMETRIC, {"loss_mode": "decoupled_ppo"})
    for flags in (*compares, {"use_rollout_log_probs": False}):
        assert not parts.make(train_async.Args, **flags).old_is_rollout
    assert parts.make(train_sync.Args, use_rollout_log_probs=True).old_is_rollout

    assert train_sync.Args().recompute_old_log_probs(2) and not train_sync.Args().recompute_old_log_probs(1)
    for flags in ({"kl_reward_coef": 1e-3}, {"rollout_is": "token"}, {"loss_mode": "kl_cov"}):
        assert parts.make(train_sync.Args, **flags).recompute_old_log_probs(1) is True, "plan.py counts it as a pass"
    assert not parts.make(train_async.Args, kl_reward_coef=1e-3).recompute_old_log_probs(2)
    assert parts.make(train_async.Args, rollout_is="token").recompute_old_log_probs(1)


@pytest.mark.slow
def test_the_weighed_kl_is_in_a_scripts_loss(trainer, demo_model):
    """k3r is not k3+ where the policy is not the one that sampled."""
    trainer.begin_again()
    groups, *_ = train_sync.make_batch(trainer.args, trainer.generator(trainer.args), 0)
    second = {"kl_loss_coef": 1e-3, "ppo_epochs": 2, "lr": 1e-3, "lr_warmup_steps": 0}  # whose policy is not the reference
    terms = []
    for of in ("k3+", "k3r"):
        args = parts.make(train_one_step_off.Args, model=demo_model, rollout_n=4, train_batch_size=4, kl_loss_type=of, **second)
        learner = Learner(demo_model, args.learner, trainer.ranks, 10**6, with_reference=True)
        terms.append(train_one_step_off.learn(args, learner, Batch.of(groups), Timers())["actor/kl_loss"])
    plus, weighed = terms
    assert plus > 0 and weighed > 0 and weighed != pytest.approx(plus, rel=1e-3)


REFUSED = {
    "length bias": ({"loss_mode": "gmpo", "loss_agg_mode": "token-mean"}, "count by their length"),
    "averaged away": ({"loss_mode": "gmpo", "adv_estimator": "reinforce_pp"}, "averaged away"),
    "nothing to compare": (
        {"use_rollout_log_probs": True, "rollout_is": "token"},
        "with --use-rollout-log-probs there are none",
    ),
    "twice": ({"loss_mode": "decoupled_ppo", "rollout_is": "token"}, "leave --use-rollout-log-probs and --rollout-is out"),
    "threshold": ({"rollout_is": "token", "rollout_is_threshold": "x"}, "write one positive number"),
    "criteria": ({"rollout_rs": "seq_mean_k4", "rollout_rs_threshold": "1"}, "rejection criterion 'seq_mean_k4'"),
    "no bound": ({"rollout_rs": "seq_mean_k3"}, "threshold ''"),
    "never a comparison": ({"adv_estimator": "rloo", "rollout_n": 1}, "--rollout-n 1 every advantage is 0"),
    "nothing to filter": (
        {"adv_estimator": "reinforce_plus_plus", "filter_groups": True, "rollout_n": 1},
        "--filter-groups keeps the groups whose scores differ: with --rollout-n 1",
    ),
    "nothing to filter with ReMax": (
        {"adv_estimator": "remax", "filter_groups": True, "rollout_n": 1},
        "--rollout-n at least 2",
    ),
    "another loss's knob": ({"loss_args": ("tau_pos=1",)}, "--loss-mode ppo_clip takes none"),
    "a knob with a flag": ({"loss_args": ("clip_high=0.3",)}, "a flag of its own, --clip-ratio-high"),
    "no such knob": ({"loss_mode": "kl_cov", "loss_args": ("coeff=1",)}, "takes coef=1, ratio=0.0002"),
    "no number": ({"loss_mode": "sapo", "loss_args": ("tau_neg=big",)}, "write tau_neg=NUMBER, above 0, such as tau_neg=1.05"),
    "no temperature": ({"loss_mode": "sapo", "loss_args": ("tau_neg=0",)}, "write tau_neg=NUMBER, above 0"),
    "no value": ({"loss_mode": "sapo", "loss_args": ("tau_neg",)}, "write tau_neg=NUMBER"),
    "gdpo": ({"adv_estimator": "gdpo"}, "takes parts and weights, which the scripts do not compute. examples/forks"),
    "moments": ({"optimizer_offload": True, "param_offload": True}, "--optimizer-offload: --param-offload keeps the moments"),
    "adapters of nothing": ({"lora_rank": 4, "lora_target": ()}, "names no layer"),
    "a critic, adapters": ({"adv_estimator": "gae", "lora_rank": 8}, "--lora-rank is there to avoid"),
    "a critic, experts": ({"adv_estimator": "gae", "expert_parallel": 2}, "--expert-parallel divides the policy's"),
    "a record without an end": ({"keep_sampling_mask": True, "top_p": 0.9}, "records .* --top-k bounds their number"),
    "a record next to a teacher": (
        {"keep_sampling_mask": True, "top_k": 5, "teacher": "x", "teacher_top_k": 4},
        "--teacher-top-k compares distributions over the whole vocabulary",
    ),
    "energy": ({"adv_estimator": "optimal_token_baseline"}, "takes energy, which the scripts do not compute. examples/forks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_contradict_each_other_are_refused(case):
    flags, reason = REFUSED[case]
    with pytest.raises(UserError, match=reason):
        check(parts.make(train_sync.Args, **flags))


def test_a_loss_without_a_ratio_is_never_left_uncorrected():
    """By default the old log-probs are the generator's. Otherwise --rollout-is must add weights, or the flags are refused."""
    for mode in ("reinforce", "gpg"):
        assert parts.make(train_async.Args, loss_mode=mode).old_is_rollout
        check(parts.make(train_async.Args, loss_mode=mode, rollout_is="sequence"))
        check(parts.make(train_sync.Args, loss_mode=mode, use_rollout_log_probs=False))
        for flags in ({"use_rollout_log_probs": False}, GEOMETRIC):
            with pytest.raises(UserError, match="has no ratio"):
                check(parts.make(train_one_step_off.Args, loss_mode=mode, **flags))


@pytest.mark.parametrize("mode", LOSSES)
def test_knobs_reach_the_loss(mode):
    """--loss-args and the clip flags reach the losses that take them, and no other loss."""
    loss = losses.POLICY_LOSSES[mode]
    further = [name for name in loss.knobs | loss.choice_knobs if not name.startswith("clip_")]
    given = tuple(f"{name}={k + 2}" for k, name in enumerate(further))
    args = parts.make(train_sync.Args, loss_mode=mode, loss_args=given, clip_ratio_low=0.5, clip_ratio_c=9)
    check(args)
    given = {name: k + 2.0 for k, name in enumerate(further)} | {"clip_low": 0.5, "clip_c": 9}
    assert args.loss.loss_knobs == {name: given[name] for name in loss.knobs if name in given}
    assert args.loss.choice_knobs == {name: given[name] for name in loss.choice_knobs}
    b = slow.random_batch([4, 3], mask_rate=1.0, spread=2)
    extra = {name: b["roll"] if name == "rollout_log_prob" else b["seq"] == 0 for name in loss.inputs}
    default, changed = (loss(*(b[k] for k in PACKED), **extra, **knobs)[0] for knobs in ({}, args.loss.loss_knobs))
    assert torch.equal(default, changed) == (mode == "reinforce")

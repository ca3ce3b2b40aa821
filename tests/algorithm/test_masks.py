"""Batches with tokens that the policy did not sample: `learn` trains what it trains of the batch without them, and metrics,
filters and warnings say what the policy did."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from helpers import is_documented, make_group
from trainer import ESTIMATORS

import losses
import train_sync
from rl import parts
from rl.algorithm import whole_batch
from rl.algorithm.metrics import batch_metrics
from rl.algorithm.staleness import staleness_metrics
from rl.learning.batch import Batch
from rl.learning.learner import Forward
from rl.ranks.timers import Timers
from rl.samples.group import UNPENALISED, Group, Response

NAMES = [name for name in ESTIMATORS if name != "gae"]
LOSSES = [name for name, f in losses.POLICY_LOSSES.items() if name == f.function.__name__]
MORE = [  # flags that look at tokens in other ways
    {},
    {"ppo_mini_batch_size": 2, "ppo_epochs": 2},
    {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"},
    {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.05", "rollout_is": "token"},
    {"kl_reward_coef": 0.1},
    {"kl_loss_coef": 1e-3, "entropy_coeff": 0.1},
    {"use_rollout_log_probs": True, "ppo_mini_batch_size": 2},
]
MASKS = ["111010", "0011", "000", "1111111", "1000", "01", "11101", "0001", "1", "00100", "0000", "11"]  # of 4 groups of 3


def masked_groups() -> list[Group]:
    """Among them responses that begin or end with tokens of others, or have nothing else, plain ones, and a group of which one
    response alone is trained. What others added is NaN."""
    rng, groups = np.random.default_rng(0), []
    for ticket in range(4):
        masks = MASKS[3 * ticket : 3 * ticket + 3]
        group = make_group(ticket, list(map(len, masks)), rng=rng)
        responses = []
        for response, text in zip(group.responses, masks, strict=True):
            mask = np.array([digit == "1" for digit in text])
            log_probs = np.where(mask, response.log_probs, np.nan).astype(np.float32)
            responses.append(dataclasses.replace(response, mask=None if mask.all() else mask, log_probs=log_probs))
        groups.append(dataclasses.replace(group, responses=responses))
    return groups


def without_masked(groups: list[Group]) -> list[Group]:
    """The groups of the policy's tokens alone, of which some responses have none."""

    def of(r: Response) -> Response:
        kept = np.ones(len(r.token_ids), bool) if r.mask is None else r.mask
        rest = {name: getattr(r, name)[kept] for name in ("token_ids", "log_probs", "versions")}
        return dataclasses.replace(r, mask=None, **rest)

    return [dataclasses.replace(g, responses=[of(r) for r in g.responses]) for g in groups]


class Learner:
    """A table in place of a model: each sampled token has a log-prob and an entropy of its own."""

    def __init__(self, batch: Batch, args: train_sync.Args, ranks):
        self.ranks, self.args = ranks, args
        rng, n = np.random.default_rng(7), int(batch.mask.sum())
        draw = lambda: torch.from_numpy(rng.standard_normal(n)).float()  # noqa: E731
        log_prob = batch.rollout_log_prob[batch.mask] + 0.4 * draw()
        self.table = torch.stack([log_prob, log_prob + 0.2 * draw(), draw().abs()]).requires_grad_()  # the second is older
        self.place = batch.mask.long().cumsum(0) - 1  # of a token in the table
        self.asked, self.updates = [], []

    def forward(self, micro, entropy="none", also=None):
        self.asked += micro.index.tolist()
        of_row = self.table[:, self.place[micro.index]]
        return Forward(of_row[0], of_row[2] if entropy == "loss" else of_row[2].detach())

    def log_probs_of(self, which, batch, micros):
        return self._row(int(which == "reference"), batch, micros)

    def _row(self, number, batch, micros):
        out = torch.zeros(len(batch.token))
        for micro in itertools.chain.from_iterable(micros):
            out[micro.index] = self.table[number].detach()[self.place[micro.index]]
        return out

    def begin_step(self, has_signal): ...

    def step(self):
        self.updates.append(self.table.grad.clone())
        with torch.no_grad():
            self.table -= 0.05 * self.table.grad
        self.table.grad = None
        return {"actor/grad_norm": float(self.updates[-1].norm()), "actor/skipped_steps": 0}


def learn(groups: list[Group], ranks, **flags) -> tuple:
    """(the gradients of all updates, each token's advantage, metrics) of a step."""
    size = {"train_batch_size": 4, "rollout_n": 3, "max_response_length": 8, "max_tokens_per_micro_batch": 30}
    args = parts.make(train_sync.Args, **size | flags)
    batch = Batch.of(groups)
    learner = Learner(batch, args, ranks)
    metrics = train_sync.learn(args, learner, batch, Timers())
    assert batch.mask[learner.asked].all(), "no log-prob of another token is asked for"
    return learner.updates, batch.targets.advantage[batch.mask], metrics


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_is_that_of_the_batch_without_masked_tokens(ranks, loss):
    """Every estimator with every loss; aggregations and corrections take turns, five of each for each loss."""
    turns = itertools.cycle([*itertools.product(losses.AGGREGATIONS, MORE)])
    for estimator, _ in itertools.product(NAMES, range(5)):
        aggregation, more = next(turns)
        flags = {"adv_estimator": estimator, "loss_mode": loss, "loss_agg_mode": aggregation, "gamma": 0.9} | more
        if losses.POLICY_LOSSES[loss].chooses:
            flags["loss_args"] = ("ratio=0.3", *(["low=0.01"] if loss == "clip_cov" else []))
        found, expected = learn(masked_groups(), ranks, **flags), learn(without_masked(masked_groups()), ranks, **flags)
        for a, b in zip([*found[0], found[1]], [*expected[0], expected[1]], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), flags
        differ = ("perf/", "response_length/", "prompt_length/", "reward/", "critic/score/", "critic/rewards/")
        metrics = [{k: v for k, v in of[2].items() if not k.startswith(differ)} for of in (found, expected)]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-4, abs=1e-5, nan_ok=True), flags


def test_lengths_and_ages_are_of_the_policys_tokens():
    groups = masked_groups()
    batch = Batch.of(groups)
    batch.targets.reward = batch.targets.advantage = torch.zeros(len(batch.token))
    found = batch_metrics(batch) | staleness_metrics(batch, 5)
    own = [text.count("1") for text in MASKS]
    for name, values in {"response_length": list(map(len, MASKS)), "response_length/trained": own}.items():
        assert found[f"{name}/mean"] == pytest.approx(sum(values) / 12), name
        assert (found[f"{name}/max"], found[f"{name}/min"]) == (max(values), min(values))
    alone = Batch.of(without_masked(groups))
    alone.targets.reward = alone.targets.advantage = torch.zeros(len(alone.token))
    expected = batch_metrics(alone) | staleness_metrics(alone, 5)
    by_token = {name for name in expected if name.startswith(("staleness", "fully_async")) and "ratio" not in name}
    assert by_token and all(found[name] == expected[name] for name in by_token)
    assert found.keys() - expected.keys() == {f"response_length/trained/{x}" for x in ("mean", "max", "min")}
    assert all(map(is_documented, found)), "a batch without masks has no further metrics"


def whole_mask(group: Group, masked: list[int]) -> Group:
    """The group with these responses masked as a whole, as it arrives from a generator."""
    nothing = lambda r: dataclasses.replace(r, mask=np.zeros(len(r.token_ids), bool))  # noqa: E731
    responses = [nothing(r) if i in masked else r for i, r in enumerate(group.responses)]
    return Group.from_bytes(dataclasses.replace(group, responses=responses).to_bytes())


@pytest.mark.parametrize(
    ("scores", "masked", "has_signal", "is_flat"),
    [
        ([0, 1, 1], [], True, False),
        ([0, 1, 1], [0], False, True),  # the only other score is of tokens that are not trained
        ([0, 1, 1], [1], True, False),
        ([0, 1, 1], [1, 2], False, False),  # a response alone: grpo trains its score
        ([1, 1, 1], [0, 1, 2], False, False),
    ],
)
def test_a_response_without_a_token_of_the_policy_has_no_part_in_its_group(scores, masked, has_signal, is_flat):
    """Groups are filtered, and passed forward alone, by what is compared; on all nodes alike."""
    group = make_group(0, [4, 5, 6])
    group.responses[:] = [dataclasses.replace(r, score=float(s)) for r, s in zip(group.responses, scores, strict=True)]
    group.responses[2] = dataclasses.replace(
        group.responses[2], mask=np.arange(6) < 4
    )  # as one that an environment has answered
    group = whole_mask(group, masked)
    assert (group.differs, group.is_flat) == (has_signal, is_flat)
    penalised = [dataclasses.replace(r, score=r.score + i, extra={UNPENALISED: r.score}) for i, r in enumerate(group.responses)]
    assert dataclasses.replace(group, responses=penalised).differs == has_signal
    batch = Batch.of([group])
    reward = whole_batch.token_reward(batch)
    advantage = losses.grpo(reward, batch.mask, batch.seq, batch.group)
    trained = {float(a) for a in advantage[batch.mask]}
    assert not is_flat or trained == {0.0}, "what passes forward alone has no advantage"
    assert whole_batch.groups_of_one(batch) == (len(masked) == 2)

"""losses.py, part four: masked tokens count for nothing. All values and gradients are those of the batch without them."""

import itertools

import losses_reference as slow
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import losses

NAMES = [name for name, f in losses.ADVANTAGES.items() if name == f.function.__name__]  # without aliases
LOSSES = [name for name, f in losses.POLICY_LOSSES.items() if name == f.function.__name__]
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)
CORRECTIONS = [
    {},
    {"level": "token"},
    {"level": "sequence", "low": 0.5},
    {"level": "sequence_geometric", "normalize": True},
    {"criteria": [("token", "k1", 0.7, 1.4)]},
    {"criteria": [("seq_mean", "k3", 0.0, 0.1), ("seq_max", "k2", 0.0, 0.4), ("seq_sum", "k1", 0.3, 3.0)]},
]
PER_TOKEN = ("lp", "old", "roll", "value", "energy", "reward", "mask", "seq")


def batch_of(lengths, seed, rate):
    """A ragged batch. Nothing is earned before a response's first trained token: without masked tokens that would be lost."""
    b = slow.random_batch(lengths, seed, mask_rate=rate)
    began = torch.zeros(len(lengths), dtype=torch.bool)
    for t, i in enumerate(b["seq"].tolist()):
        began[i] |= b["mask"][t]
        b["reward"][t] *= bool(began[i])
    return b


def without_masked(b):
    """The batch of the trained tokens alone; what a masked one earns goes to the trained one before it."""
    x = {name: [] for name in PER_TOKEN}
    for t in range(len(b["seq"])):
        if b["mask"][t]:
            for name in PER_TOKEN:
                x[name].append(b[name][t])
        elif x["reward"] and x["seq"][-1] == b["seq"][t]:
            x["reward"][-1] = x["reward"][-1] + b["reward"][t]
    return {name: torch.stack(of) if of else b[name][:0] for name, of in x.items()} | {
        name: b[name] for name in ("group", "parts", "weights")
    }


def train(b, estimator, loss, aggregation, correction, gamma):
    """(loss, gradient of the trained tokens, advantages and weights of the trained tokens) as the scripts compute them."""
    lp, mask, seq = b["lp"].clone().requires_grad_(), b["mask"], b["seq"]
    compare, trained, weight = (b["lp"], b["roll"], mask, seq), mask, torch.ones_like(b["lp"])
    if "level" in correction:
        weight = losses.rollout_is_weights(*compare, **correction)
    if "criteria" in correction:
        trained = losses.rollout_rejection_mask(*compare, **correction)
    f, policy_loss = losses.ADVANTAGES[estimator], losses.POLICY_LOSSES[loss]
    more = {"value": b["value"]} if "value" in f.inputs else {}
    more |= {"energy": b["energy"]} if "energy" in f.inputs else {}
    more |= {"baseline": b["group"] / 5.0} if "baseline" in f.inputs else {}
    more |= {name: b[name] for name in ("parts", "weights") if name in f.inputs}
    more |= {"gamma": gamma} if "gamma" in f.knobs else {}
    advantage = f(b["reward"], trained, seq, b["group"], **more)
    advantage = torch.where(advantage.abs() < 1e-9, 0.0, advantage)  # what rounding leaves of 0 has no sign to clip by
    inputs = {"rollout_log_prob": b["roll"]} if "rollout_log_prob" in policy_loss.inputs else {}
    if policy_loss.chooses:
        options = {"generator": torch.Generator().manual_seed(0)} if "generator" in policy_loss.choice_inputs else {}
        # Of tokens with equal covariances any may be chosen; those of two tokens always are.
        options |= {"ratio": 0.3 if trained.sum() > 2 else 1.0} | ({"low": 0.01} if options else {})
        uneven = advantage + 0.1 * b["value"]
        inputs["chosen"] = policy_loss.chooses(b["old"], uneven, trained, **options)
    token_loss, stats = policy_loss(lp, b["old"], advantage, trained, seq, **inputs)
    token_loss = token_loss * losses.importance_weight(lp, b["old"], trained) * weight
    token_loss = token_loss + losses.kl_penalty(lp, b["roll"], trained, "k3")
    divisor = losses.denominator(trained, seq, aggregation, len(b["group"]), 8)
    total = losses.aggregate(token_loss, trained, seq, aggregation, divisor)
    total.backward()
    means = {name: losses.masked_mean(value, trained) for name, value in stats.items()}
    return [total.detach(), lp.grad[mask], advantage[mask], weight[mask], *means.values()]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 9999), st.sampled_from([0.0, 0.3, 0.7]), st.sampled_from([1.0, 0.9, 0.5]))
def test_masked_tokens_might_as_well_not_be_there(loss, lengths, seed, rate, gamma):
    """For each estimator, loss, aggregation and correction; whatever masked tokens hold is not looked at."""
    b = batch_of(lengths, seed, rate)
    alone = without_masked(b)
    assume(len(alone["seq"]) != len(lengths))  # then `group` might be one entry a token, which is refused
    for name in ("lp", "old", "roll", "value", "energy"):
        b[name][~b["mask"]] = torch.nan
    combinations = [*itertools.product(NAMES, losses.AGGREGATIONS, CORRECTIONS)]
    for i in range(seed % 31, len(combinations), 31):  # each example has a part of them
        what = (combinations[i][0], loss, *combinations[i][1:], gamma)
        for found, expected in zip(train(b, *what), train(alone, *what), strict=True):
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9), what


def test_a_step_is_a_trained_token():
    """By hand: the policy's tokens are 0 and 3, and the environment's 1, 2 and 4, of which the last earns 1."""
    mask, seq = torch.tensor([True, False, False, True, False, True]), torch.tensor([0, 0, 0, 0, 0, 1])
    reward = torch.tensor([0.0, 0, 4, 0, 1, 8])
    assert losses.return_to_go(reward, mask, seq, 0.5).tolist() == [4.5, 0, 0, 1, 0, 8]
    assert losses.return_to_go(reward, ~mask, seq, 0.5).tolist() == [0, 2.25, 4.5, 0, 1, 0]

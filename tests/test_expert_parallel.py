"""Experts over several ranks: gradients, metrics, updates and checkpoints are those of one rank that has them all."""

import pytest
from layouts import ALONE, CASES, assert_taught_the_same, learn_on


@pytest.fixture(scope="module")
def alone(models):
    """What one rank is taught."""
    return learn_on(1, {"alone": [models["moe"], ALONE]})


TIGHT = {"ppo_max_token_len_per_gpu": 40, "gradient_checkpointing": True}
LAYOUTS = {
    2: {
        "ep 2": {"expert_parallel": 2} | ALONE,
        "sp 2, ep 2": {"sequence_parallel": 2, "expert_parallel": 2} | TIGHT,
    },
    4: {
        "ep 2, each on two ranks": {"expert_parallel": 2} | ALONE,
        "ep 4": {"expert_parallel": 4} | TIGHT,
        "sp 2, ep 4": {"sequence_parallel": 2, "expert_parallel": 4} | TIGHT,
        "sp 4, ep 2": {"sequence_parallel": 4, "expert_parallel": 2} | ALONE,
    },
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_experts_are_taught_what_one_rank_is(models, alone, ranks):
    found = learn_on(ranks, {name: [models["moe"], flags] for name, flags in LAYOUTS[ranks].items()})
    assert len(found) == len(CASES) * len(LAYOUTS[ranks])
    assert_taught_the_same(found, alone)

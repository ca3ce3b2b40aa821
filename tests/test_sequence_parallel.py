"""Sequences over several ranks: gradients, metrics and updates are those of one rank, whatever the loss."""

import re

import pytest
from layouts import ALONE, CASES, assert_taught_the_same, learn_on
from transformers import Qwen2Config

from rl.errors import UserError
from rl.sequence_parallel import check_heads


@pytest.fixture(scope="module")
def alone(models):
    """What one rank is taught."""
    return learn_on(1, {"alone": [models["qwen2-tied"], ALONE]})


def test_groups_of_two_ranks_are_taught_what_one_rank_is(models, alone):
    flags = {"sequence_parallel": 2, "gradient_checkpointing": True, "ppo_max_token_len_per_gpu": 16}
    found = learn_on(4, {"2 x 2": [models["qwen2-tied"], flags]})
    assert len(found) == len(CASES)
    assert_taught_the_same(found, alone)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_on_one_row_are_taught_what_one_rank_is(models, alone, size):
    """Four ranks: each of the two heads of keys and values is on two of them, and a row of one token is mostly padding."""
    flags = {"sequence_parallel": size}
    tight = flags | {"ppo_max_token_len_per_gpu": 32 // size}  # of one rank: no whole sequence
    found = learn_on(size, {"tight": [models["qwen2-tied"], tight], "roomy": [models["qwen2-tied"], flags | ALONE]})
    assert_taught_the_same(found, alone)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (5, "--sequence-parallel 5: between its ranks attention is split by heads, and the model has 12."),
        (3, "4 heads of keys and values, which its ranks can neither divide nor share evenly. Take one of 1, 2, 4, 12."),
        (6, "the model has 4 heads of keys and values"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(size, said):
    config = Qwen2Config(num_attention_heads=12, num_key_value_heads=4)
    with pytest.raises(UserError, match=re.escape(said)):
        check_heads(config, size)
    for fitting in (1, 2, 4, 12):
        check_heads(config, fitting)

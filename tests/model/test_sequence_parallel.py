"""Sequences sharded over several ranks: gradients, metrics and updates equal those of one rank for every loss."""

import re

import pytest
from helpers import SMALL, run_script, train
from layouts import ALONE, CASES, assert_taught_the_same, learn_on
from transformers import AutoModelForCausalLM, Qwen2Config

from rl.errors import UserError
from rl.model.sequence_parallel import check_heads


@pytest.fixture(scope="module")
def alone(models):
    """Return the results of training on one rank."""
    return learn_on(1, {"alone": [models["qwen2-tied"], ALONE]})


@pytest.mark.runs
def test_groups_of_two_ranks_are_taught_what_one_rank_is(models, alone):
    flags = {"sequence_parallel": 2, "gradient_checkpointing": True, "max_tokens_per_micro_batch": 16}
    found = learn_on(4, {"2 x 2": [models["qwen2-tied"], flags]})
    assert len(found) == len(CASES)
    assert_taught_the_same(found, alone)


@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_on_one_row_are_taught_what_one_rank_is(models, alone, size):
    """Four ranks: each of the two heads of keys and values is on two of them, and a row of one token is mostly padding."""
    flags = {"sequence_parallel": size}
    tight = flags | {"max_tokens_per_micro_batch": 32 // size}  # of one rank: no whole sequence
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


@pytest.mark.runs
@pytest.mark.slow
def test_64k_tokens_in_one_sequence_go_over_four_ranks(tmp_path):
    """Each rank takes 16,400 tokens. The gradient equals that of one rank with all tokens."""
    small = SMALL | {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    AutoModelForCausalLM.from_config(Qwen2Config(**small)).save_pretrained(tmp_path / "model")
    case = {"long": ({"entropy_coeff": 0.1}, [[65_530]])}
    four = {"sequence_parallel": 4, "max_tokens_per_micro_batch": 16_400}
    found = learn_on(4, {"four": [str(tmp_path / "model"), four]}, case)
    assert_taught_the_same(found, learn_on(1, {"one": [str(tmp_path / "model"), {"max_tokens_per_micro_batch": 65_600}]}, case))


@pytest.mark.runs
@pytest.mark.slow
@pytest.mark.parametrize(("script", "ranks", "flags"), [("train_sync.py", 2, []), ("train_async.py", 3, ["--generators", "1"])])
def test_the_demo_is_trained_on_shared_sequences(script, ranks, flags, tmp_path):
    """Prompt and response do not fit on one rank."""
    flags = [*flags, "--sequence-parallel", "2", "--max-tokens-per-micro-batch", "24", "--total-training-steps", "3"]
    metrics, _, _ = train(script, *flags, "--max-prompt-length", "24", "--max-response-length", "16", out=tmp_path, ranks=ranks)
    for step in (1, 2, 3):
        assert metrics[step]["training/rollout_probs_diff_max"] < 1e-3 or script == "train_async.py"
        assert metrics[step]["actor/grad_norm"] > 0


@pytest.mark.runs
def test_learners_that_are_left_over_are_refused(tmp_path):
    done = run_script("train_sync.py", "--sequence-parallel", "2", "--output-dir", tmp_path, check=False, timeout=120)
    assert done.returncode == 1 and "error: --sequence-parallel 2 does not divide the 1 learners." in done.stderr

"""Learners that hold only their own responses' tokens compute the same batch statistics as one that holds all tokens."""

import re

import pytest
from helpers import run_script


@pytest.mark.runs
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_a_divided_batch_is_the_whole_one(sequence_parallel):
    """Bit for bit: every estimator's advantages, batch-normalised weights, rejected and chosen tokens, denominators."""
    done = run_script("tests/programs/shares.py", sequence_parallel, ranks=4)
    reported = re.findall(r"rank (\d): (\d+) of (\d+) tokens", done.stdout)
    held = {int(rank): (int(own), int(whole)) for rank, own, whole in reported}
    assert sorted(held) == [0, 1, 2, 3]
    assert sum(own for own, _ in held.values()) == sequence_parallel * held[0][1]

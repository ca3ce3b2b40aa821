"""Files with weights: of any number of tickets each has its part, its rows are visited equally often, and the order is a
function of the ticket alone."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_data import dataset, verl_row, write

from rl.data.args import demo_files
from rl.data.files import weights_of
from rl.data.job import order_of
from rl.data.prompts import PromptOrder
from rl.data.weights import WeightedOrder
from rl.errors import UserError

FILES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=6)  # weight and rows of each


@given(FILES, st.integers(0, 2**31))
def test_each_file_has_its_part(files, seed):
    """Of the first t tickets within one, so of any window within two; with two files, of any window within one."""
    weights, sizes = zip(*files, strict=True)
    file_of = [file for file, size in enumerate(sizes) for _ in range(size)]
    order = WeightedOrder(sizes, [*map(Fraction, weights)], seed)
    drawn = [file_of[order(ticket)[1]] for ticket in range(2 * sum(weights) + 7)]
    parts = [Fraction(weight, sum(weights)) for weight in weights]
    for file, part in enumerate(parts):
        lead, leads = Fraction(0), [Fraction(0)]  # by how much the file is ahead of its part
        for of_ticket in drawn:
            lead += (of_ticket == file) - part
            leads.append(lead)
        assert max(map(abs, leads)) < 1
        assert max(leads) - min(leads) <= (1 if len(weights) <= 2 else 2)


@given(FILES, st.integers(0, 2**31), st.booleans())
def test_each_row_of_a_file_is_visited_equally_often(files, seed, shuffle):
    weights, sizes = zip(*files, strict=True)
    order, again = (WeightedOrder(sizes, [*map(Fraction, weights)], seed, shuffle) for _ in range(2))
    tickets = range(3 * max(sizes) * sum(weights))
    drawn = [order(ticket) for ticket in tickets]
    assert [again(ticket) for ticket in reversed(tickets)] == drawn[::-1], "a ticket's place depends on nothing but itself"
    assert [epoch for epoch, _ in drawn] == [ticket // sum(sizes) for ticket in tickets]
    for first, end in pairwise([sum(sizes[:file]) for file in range(len(sizes) + 1)]):
        rows = [row for _, row in drawn if first <= row < end]
        for place in range(0, len(rows) - len(rows) % (end - first), end - first):
            lap = rows[place : place + end - first]
            assert sorted(lap) == [*range(first, end)] and (shuffle or lap == sorted(lap))
        visits = Counter(rows)
        assert max(visits.values()) - min(visits[row] for row in range(first, end)) <= 1


def test_laps_files_and_seeds_differ():
    laps = set()
    for seed in (1, 2):
        drawn = [WeightedOrder([50, 50], [Fraction(1)] * 2, seed)(ticket)[1] for ticket in range(200)]
        for rows in ([row for row in drawn if row < 50], [row - 50 for row in drawn if row >= 50]):
            laps |= {tuple(rows[:50]), tuple(rows[50:])}
    assert len(laps) == 8


def test_weights_are_numbers_and_all_other_texts_are_hub_configs():
    assert weights_of(["a.parquet", "org/name:config", "org/name:v2", "a:b:c"]) == (
        ["a.parquet", "org/name:config", "org/name:v2", "a:b:c"],
        None,
    )
    files, weights = weights_of(["a.parquet:2", "org/name:config", "org/name:2024:.5", "demo:+1."])
    assert files == ["a.parquet", "org/name:config", "org/name:2024", "demo"] and weights == [2, 1, Fraction(1, 2), 1]
    assert demo_files("demo-vl", ("demo:2", "demo", "demos:2")) == ("demo-vl:2", "demo-vl", "demos:2")


@pytest.mark.parametrize(
    ("words", "split", "said"),
    [
        (["a.jsonl:0"], "train", "--train-files .*a.jsonl:0: a weight is above 0"),
        (["a.jsonl:-1", "b.jsonl"], "train", "--train-files .*a.jsonl:-1: a weight is above 0"),
        (["a.jsonl", "b.jsonl:2"], "val", "--val-files .*b.jsonl:2: a file has no weight here"),
        (["no.jsonl:2"], "train", "no.jsonl: no such file"),
    ],
)
def test_weights_of_no_use(words, split, said, tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, verl_row("1+1=", "2"))
    with pytest.raises(UserError, match=said):
        dataset(*(tmp_path / word for word in words), split=split)


def test_the_order_of_files(tmp_path):
    """Rows that are left out do not count; without weights it is the order that there always was."""
    long = verl_row("1+1=" * 40)
    a = write(tmp_path / "a.jsonl", long, *(verl_row(f"{i}+1=") for i in range(3)))
    b = write(tmp_path / "b.jsonl", verl_row("5+5="), long)
    plain = order_of(dataset(a, b, filter_overlong_prompts=True), 7, True)
    assert type(plain) is PromptOrder and [plain(t) for t in range(99)] == [PromptOrder(4, 7)(t) for t in range(99)]
    rows = dataset(f"{a}:0.5", b, filter_overlong_prompts=True)
    drawn = [rows[order_of(rows, 7, True)(ticket)[1]].where for ticket in range(9)]
    assert Counter(drawn) == {f"{b} row 0": 6} | {f"{a} row {number}": 1 for number in (1, 2, 3)}
    with pytest.raises(UserError, match=r"b.jsonl has a weight, and no row that is used"):
        order_of(dataset(a, f"{b}:2", filter_overlong_prompts=True, train_max_samples=3), 7, True)
    with pytest.raises(UserError, match=r"the weights 0.333333, 1 have too many digits"):
        order_of(dataset(f"{a}:0.33333333", b, filter_overlong_prompts=True), 7, True)

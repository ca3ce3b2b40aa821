"""Rows may lack what an environment brings: the ground truth, the data_source, and the prompt."""

import pytest
from test_data import dataset, write

import train_sync
from rl import parts
from rl.data.tables import ENVIRONMENT, GSM8K
from rl.environments import named
from rl.errors import UserError

ALL, TRUTH = frozenset({"prompt", "ground_truth"}), frozenset({"ground_truth"})
CHAT = [{"role": "user", "content": "12"}]


def read(path, rows, brought=frozenset()):
    return dataset(write(path / "rows.jsonl", *rows), brought=brought)


@pytest.mark.parametrize(
    "row", [{"level": 3}, {"prompt": [], "level": 3}, {"prompt": "", "level": 3}, {"prompt": None, "level": 3}]
)
def test_a_row_may_have_no_prompt(row, tmp_path):
    (prompt,) = read(tmp_path, [row], ALL)
    assert prompt.ids == [] and prompt.text == "" and prompt.row == {"prompt": [], "level": 3}
    assert prompt.ground_truth is None and prompt.data_source == ENVIRONMENT
    with pytest.raises(UserError):
        read(tmp_path, [row], TRUTH)
    with pytest.raises(UserError):
        read(tmp_path, [row])


def test_rows_with_and_without_a_prompt(tmp_path):
    rows = [{"prompt": CHAT, "n": 1}, {"prompt": [], "n": 2}, {"prompt": [{"role": "user", "content": ""}], "n": 3}]
    prompts = read(tmp_path, rows, ALL)
    assert [bool(prompt.ids) for prompt in prompts] == [True, False, True] and prompts.sources() == {
        ENVIRONMENT: f"{tmp_path / 'rows.jsonl'} row 0"
    }
    assert [prompts.about(index).get("prompt") for index in range(3)] == ["12", None, None], "the record's"


@pytest.mark.parametrize("brought", [ALL, TRUTH])
def test_a_row_may_have_no_ground_truth(brought, tmp_path):
    rows = [{"prompt": CHAT}, {"prompt": CHAT}]
    prompts = read(tmp_path, rows, brought)
    assert len(prompts) == 2 and prompts[1].ground_truth is None and prompts.source(0) == ENVIRONMENT
    assert len(read(tmp_path, [row | {"data_source": None} for row in rows], brought)) == 2
    for lacks, said in (({}, "no ground truth"), ({"answer": "#### "}, "no ground truth"), ({"answer": "7"}, "data_source")):
        with pytest.raises(UserError, match=said):
            read(tmp_path, [row | lacks for row in rows])
        assert len(read(tmp_path, [row | lacks for row in rows], brought)) == 2


def test_an_answer_that_is_gsm8k_s_is_graded_as_before(tmp_path):
    rows = [{"question": "12", "answer": "as is #### 7"}]
    for brought in (ALL, TRUTH, frozenset()):
        (prompt,) = read(tmp_path, rows, brought)
        assert (prompt.data_source, prompt.ground_truth, bool(prompt.ids)) == (GSM8K, "7", True)
    (prompt,) = read(tmp_path, [{"question": "12", "answer": "yes"}], ALL)
    assert (prompt.data_source, prompt.ground_truth) == (ENVIRONMENT, "yes")


@pytest.mark.parametrize(
    ("flags", "brought"),
    [
        ({}, set()),
        ({"env": "x.py:X"}, ALL),
        ({"agent": "true"}, ALL),
        ({"serve_policy": 8000}, ALL),
        ({"tools": "x.py:f"}, set()),
        ({"tools": "x.py:f", "reward": "x.py:g"}, TRUTH),
        ({"reward": "x.py:g"}, set()),
    ],
)
def test_who_brings_what(flags, brought):
    args = parts.make(train_sync.Args, **flags)
    assert named.brought(args.environment, args.reward.own_reward) == brought

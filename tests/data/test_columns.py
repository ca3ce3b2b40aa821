"""Columns of unexpected types, in every column that is read: one sentence with the file, the row or column, and what to do."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.demo.sums import build_tokenizer
from rl.children.server import plain
from rl.data.args import DataArgs
from rl.data.prompts import PromptDataset
from rl.errors import UserError

TOKENIZER = build_tokenizer()
CHAT = [{"role": "user", "content": "1+1="}]
ROW = {
    "data_source": pa.array(["demo"]),
    "prompt": pa.array([CHAT]),
    "reward_model": pa.array([{"ground_truth": "2"}]),
    "extra_info": pa.array([{"index": 1}]),
}
VALUES = {
    "bytes": pa.array([b"\xff"]),
    "a list": pa.array([["1"]]),
    "an object": pa.array([{"a": 1}]),
    "an object of an object": pa.array([{"ground_truth": {"a": b"1"}}]),
    "a map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
}


def parquet(path, columns: dict[str, pa.Array]) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def use_prompts(file: str) -> None:
    """What a run does with each column."""
    prompts = PromptDataset([file], "train", TOKENIZER, DataArgs())
    prompts.sources()
    assert sum(prompts.source_sizes().values()) == 1
    (prompt,) = prompts
    prompts.source(0)
    json.dumps([prompt.ground_truth, prompt.extra_info, prompt.row], default=plain)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("data_source", "a list", r"row 0: data_source is \['1'\]\. Put a name there, as text"),
        ("data_source", "an object", r"row 0: data_source is \{'a': 1\}\. Put a name there, as text"),
        ("data_source", "bytes", r"row 0: data_source is b'\\xff'\. Put a name there, as text"),
        ("reward_model", "a list", r"row 0: no ground truth: reward_model is \['1'\]"),
        ("answer", "a list", r"row 0: the answer is \['1'\]\. Save it as text"),
        ("prompt", "bytes", r"row 0: column 'prompt' is neither a string .*, but b'\\xff'"),
        ("ability", "a map", r"cannot be read .*'ability'.*save that column as text"),
    ],
)
def test_what_is_said_of_a_column(column, value, said, tmp_path):
    rest = {name: its for name, its in ROW.items() if column != "answer" or name != "reward_model"}
    with pytest.raises(UserError, match=f"x.parquet:? {said}"):
        use_prompts(parquet(tmp_path / "x.parquet", rest | {column: VALUES[value]}))

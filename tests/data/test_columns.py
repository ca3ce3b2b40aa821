"""Columns of unexpected types, in every column that is read: one sentence with the file, the row or column, and what to do."""

import datetime
import decimal
import functools
import json
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.demo.sums import build_tokenizer
from rl.data.args import DataArgs
from rl.data.demonstrations import DemonstrationArgs, Demonstrations
from rl.data.prompts import PromptDataset
from rl.errors import UserError
from rl.rewards.pool import plain

TOKENIZER = build_tokenizer()
CHAT = [{"role": "user", "content": "1+1="}]
ROW = {
    "data_source": pa.array(["demo"]),
    "prompt": pa.array([CHAT]),
    "reward_model": pa.array([{"ground_truth": "2"}]),
    "extra_info": pa.array([{"index": 1}]),
}
DAY = datetime.datetime(2020, 1, 1)
VALUES = {
    "text": pa.array(["1"]),
    "large text": pa.array(["1"], pa.large_string()),
    "a view of text": pa.array(["1"], pa.string_view()),
    "text in a dictionary": pa.array(["1"]).dictionary_encode(),
    "nothing": pa.nulls(1),
    "null": pa.array([None], pa.string()),
    "a whole number": pa.array([1]),
    "a number beyond int64": pa.array([2**63], pa.uint64()),
    "half precision": pa.array([1.5], pa.float16()),
    "a decimal": pa.array([decimal.Decimal("1.5")]),
    "a truth": pa.array([True]),
    "bytes": pa.array([b"\xff"]),
    "bytes of one length": pa.array([b"ab"], pa.binary(2)),
    "a time": pa.array([DAY]),
    "nanoseconds": pa.array([1], pa.timestamp("ns")),
    "a list": pa.array([["1"]]),
    "a list of bytes": pa.array([[b"\xff"]]),
    "a list of lists": pa.array([[["1"]]]),
    "an empty list": pa.array([[]], pa.list_(pa.string())),
    "a pair": pa.array([[1, 2]], pa.list_(pa.int64(), 2)),
    "an object": pa.array([{"a": 1}]),
    "an object of an object": pa.array([{"ground_truth": {"a": b"1"}}]),
    "a map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
    "JSON": pa.array(['{"a": 1}'], pa.json_()),
    "a UUID": pa.array([uuid.UUID(int=0).bytes], pa.uuid()),
    "messages": pa.array([CHAT]),
    "one message": pa.array(CHAT),
    "messages of parts": pa.array([[{"role": "user", "content": [{"type": "text", "text": "1"}]}]]),
    "messages of numbers": pa.array([[{"role": 1, "content": 2}]]),
}
TEXTS = {"text", "large text", "a view of text", "text in a dictionary"}
FITS = {  # column -> values that it must take, among others
    "data_source": TEXTS,
    "prompt": TEXTS | {"messages"},
    "question": TEXTS | {"messages"},
    "reward_model": set(),
    "ground_truth": TEXTS | {"a whole number", "a list", "an object", "half precision", "a decimal", "a truth"},
    "answer": TEXTS | {"a whole number", "half precision", "a decimal", "a truth"},
    "extra_info": TEXTS | {"a whole number", "bytes", "a list of lists", "an object"},  # a reward function gets it as it is
    "images": {"nothing", "null", "an empty list"},  # the model takes none
    "ability": TEXTS | {"a whole number", "bytes", "a list of lists", "an object"},  # not read, but part of the row
}


def parquet(path, columns: dict[str, pa.Array]) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def is_used(use) -> bool:
    """Whether `use` reads the file; else its message is one line that names the file, and the column or the value's row."""
    try:
        use()
    except UserError as error:
        said = str(error)
        assert "\n" not in said and "x.parquet" in said and said.count(". ") >= 1, said
        return False
    return True


def use_prompts(file: str) -> None:
    """What a run does with each column."""
    prompts = PromptDataset([file], "train", TOKENIZER, DataArgs())
    prompts.sources()
    assert sum(prompts.source_sizes().values()) == 1
    (prompt,) = prompts
    prompts.source(0)
    json.dumps([prompt.ground_truth, prompt.extra_info, prompt.row], default=plain)


@pytest.mark.slow
@pytest.mark.parametrize("column", FITS)
def test_a_column_of_any_type_is_read_or_named(column, tmp_path):
    others = {
        "question": {"data_source": ROW["data_source"], "answer": pa.array(["#### 2"])},
        "ground_truth": {name: ROW[name] for name in ("data_source", "prompt")},
        "answer": {name: ROW[name] for name in ("data_source", "prompt")},
    }
    rest = others.get(column, ROW)
    files = {
        name: parquet(tmp_path / f"{i} x.parquet", rest | {column: value}) for i, (name, value) in enumerate(VALUES.items())
    }
    used = {name for name, file in files.items() if is_used(functools.partial(use_prompts, file))}
    assert FITS[column] <= used and (column in ("ability", "extra_info") or len(used) < len(VALUES) - 4)


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


DEMONSTRATION = {"prompt": ROW["prompt"], "response": pa.array(["2"])}
TAUGHT = {"messages": {"nothing", "null"}, "prompt": TEXTS | {"messages"}, "response": TEXTS, "ability": TEXTS}


def use_demonstrations(file: str) -> None:
    list(Demonstrations([file], "train", TOKENIZER, DemonstrationArgs(), {TOKENIZER.eos_token_id}))


@pytest.mark.slow
@pytest.mark.parametrize("rest", [DEMONSTRATION, {}])
@pytest.mark.parametrize("column", TAUGHT)
def test_a_column_of_demonstrations(column, rest, tmp_path):
    """Also where there is no other column."""
    files = {
        name: parquet(tmp_path / f"{i} x.parquet", rest | {column: value}) for i, (name, value) in enumerate(VALUES.items())
    }
    used = {name for name, file in files.items() if is_used(functools.partial(use_demonstrations, file))}
    assert (TAUGHT[column] <= used and (column == "ability" or used <= TAUGHT[column])) if rest else not used


RAISED = {
    "a word": "{{ raise_exception('no such role') }}",
    "an unknown function": "{{ messages.nothing() }}",
    "a type": "{{ messages[0] + 1 }}",
    "a division": "{{ 1 / 0 }}",
    "a range": "{{ range(10 ** 9) | list }}",
    "a key": "{{ '{missing}'.format() }}",
    "an index": "{{ '{}'.format() }}",
    "a value": "{{ 'a'.index('b') }}",
    "a recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "syntax": "{% if %}",
    "no template": 7,
}


@pytest.mark.parametrize("case", RAISED)
def test_a_template_may_raise_anything(case, tmp_path):
    """Over prompts and over demonstrations."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = RAISED[case]
    prompts = parquet(tmp_path / "x.parquet", ROW)
    taught = parquet(tmp_path / "y.parquet", DEMONSTRATION)
    uses = (
        lambda: PromptDataset([prompts], "train", tokenizer, DataArgs()),
        lambda: Demonstrations([taught], "train", tokenizer, DemonstrationArgs(), {1}),
    )
    for use in uses:
        said = r"[xy]\.parquet row 0: the model's chat template refuses the messages \(\w+: .*Fix their roles"
        with pytest.raises(UserError, match=said) as raised:
            use()
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 600

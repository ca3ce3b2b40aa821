"""--map: rows are what the user's function returns of them; one that it leaves out or spoils keeps its number in messages."""

import pytest
from datasets import Dataset
from test_data import TOKENIZER, dataset, write

import train_sync
from rl import parts
from rl.data.demonstrations import DemonstrationArgs, Demonstrations
from rl.errors import UserError
from rl.ranges import check

FILE = '''
from words import SOURCE  # a file next to this one


def to_verl(row):
    """From columns of another project; every third row is left out."""
    if row["number"] % 3 == 2:
        return None
    truth = {"ground_truth": row["a"] + row["b"]}
    return {"prompt": f"{row['a']}+{row['b']}=", "data_source": SOURCE, "reward_model": truth, "response": "1"}


def raises(row):
    return to_verl(row) if row["number"] < 1 else row["no_such_column"]


def returns_text(row):
    return "1+1="


def returns_numbers(row):
    return {1: 2}


def returns_nothing(row):
    pass


def returns_kinds(row):
    return None if row["number"] == 0 else {"a": row["number"] if row["number"] < 3 else "text"}


def no_prompt(row):
    return None if row["number"] == 0 else to_verl(row) | {"prompt": 7}


no_function = 7
'''
ROWS = [{"number": number, "a": 10 + number, "b": 20} for number in range(8)]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("code") / "map.py"
    path.with_name("words.py").write_text('SOURCE = "demo"\n')
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_what_the_function_returns(kind, split, file, tmp_path):
    rows = str(write(tmp_path / "rows.jsonl", *ROWS))
    if kind == "parquet":
        Dataset.from_list(ROWS).to_parquet(rows := str(tmp_path / "rows.parquet"))
    found = dataset(rows, split=split, map=f"{file}:to_verl")
    numbers = [0, 1, 3, 4, 6, 7]
    assert [prompt.text for prompt in found] == [f"{10 + number}+20=" for number in numbers]
    assert [prompt.ground_truth for prompt in found] == [30 + number for number in numbers]
    assert [prompt.where for prompt in found] == [f"{rows} row {number}" for number in numbers]
    assert found.about(2)["where"] == f"{rows} row 3" and found.sources() == {"demo": f"{rows} row 0"}
    assert found.about(2)["prompt"] == "13+20="
    few = dataset(rows, split=split, map=f"{file}:to_verl", train_max_samples=3, val_max_samples=3)
    assert [prompt.where for prompt in few] == [f"{rows} row {number}" for number in numbers[:3]]
    both = dataset(rows, rows, rows, split=split, map=f"{file}:to_verl", train_max_samples=7, val_max_samples=7)
    assert [prompt.where for prompt in both] == [f"{rows} row {number}" for number in [*numbers, 0]]


def test_conversations_are_mapped_as_well(file, tmp_path):
    rows = str(write(tmp_path / "rows.jsonl", *ROWS))
    args = DemonstrationArgs(map=f"{file}:to_verl")
    found = Demonstrations([rows], "train", TOKENIZER, args, {TOKENIZER.eos_token_id})
    assert len(found) == 6 and TOKENIZER.decode(found[2].ids).startswith("13+20=1")
    with pytest.raises(UserError, match=r"rows.jsonl row 2: the conversation has \d+ tokens"):
        args = DemonstrationArgs(map=f"{file}:to_verl", max_length=2)
        Demonstrations([str(write(tmp_path / "rows.jsonl", ROWS[2], *ROWS[2:]))], "train", TOKENIZER, args, {1})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", r"rows.jsonl row 1: --map .*map.py:raises raised KeyError: 'no_such_column' \(.*map.py:14\)"),
        ("returns_text", r"rows.jsonl row 0: --map .*returned '1\+1='. Return a row"),
        ("returns_numbers", r"rows.jsonl row 0: --map .*returned {1: 2}. Return a row"),
        ("returns_nothing", "rows.jsonl: --map .*leaves no row"),
        ("returns_kinds", "rows.jsonl: column 'a' cannot be read .*'text'"),
        ("no_prompt", "rows.jsonl row 1: column 'prompt' is neither a string nor"),
        ("no_function", "map.py has no function 'no_function'"),
        ("nowhere", "map.py has no function 'nowhere'"),
    ],
)
def test_what_a_function_spoils_is_named_with_file_and_row(name, said, file, tmp_path):
    with pytest.raises(UserError, match=said):
        dataset(write(tmp_path / "rows.jsonl", *(ROWS[:2] + ROWS[3:5])), map=f"{file}:{name}")


def test_a_file_that_cannot_be_imported_is_named(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"--map .*bad.py:f: ZeroDivisionError: division by zero \(.*bad.py:1\)"):
        dataset(write(tmp_path / "rows.jsonl", *ROWS), map=f"{tmp_path}/bad.py:f")
    for value, said in (("no.py:f", "there is no file no.py"), ("no.py", "write it as path/to/file.py:function")):
        with pytest.raises(UserError, match=f"--map {value}: {said}"):
            check(parts.make(train_sync.Args, map=value))

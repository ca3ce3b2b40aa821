"""--map: rows are what the user's function returns of them; one that it leaves out or spoils keeps its number in messages."""

import json
import shutil

import numpy as np
import pytest
from datasets import Dataset, Image
from helpers import bits, run_script
from test_data import TOKENIZER, dataset, write

import rehearse
import train_sync
from examples.demo.sums import problems
from rl import parts
from rl.data.demonstrations import DemonstrationArgs, Demonstrations
from rl.data.mapped import mapped
from rl.data.tables import read_table
from rl.errors import UserError
from rl.ranges import check

FILE = '''
import random

import numpy

from words import SOURCE  # a file next to this one


def to_verl(row):
    """From columns of another project; every third row is left out."""
    if row["number"] % 3 == 2:
        return None
    truth = {"ground_truth": row["a"] + row["b"]}
    return {"prompt": f"{row['a']}+{row['b']}=", "data_source": SOURCE, "reward_model": truth, "response": "1"}


def draws(row):
    return {"question": f"{random.randint(10, 99)}+{numpy.random.randint(10, 99)}=", "answer": "#### 1"}


def same(row):
    return row


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
    path.with_name("random_words.py").write_text("")
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


def test_random_numbers_are_the_row_s(file, tmp_path):
    rows = write(tmp_path / "rows.jsonl", *ROWS)
    first, again = ([prompt.text for prompt in dataset(rows, map=f"{file}:draws")] for _ in range(2))
    assert first == again and len({*first}) > 6


def test_images_come_as_files_and_pass_through(file, tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    Dataset.from_dict({"images": [[pixels]] * 2, "n": [1, 2]}).cast_column("images", [Image()]).to_parquet(
        path := str(tmp_path / "rows.parquet")
    )
    found = mapped(read_table(path, "train"), path, f"{file}:same")
    assert [row["n"] for row in found] == [1, 2] and found[0]["images"][0]["bytes"].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", r"rows.jsonl row 1: --map .*map.py:raises raised KeyError: 'no_such_column' \(.*map.py:26\)"),
        ("returns_text", r"rows.jsonl row 0: --map .*returned '1\+1='. Return a row"),
        ("returns_numbers", r"rows.jsonl row 0: --map .*returned {1: 2}. Return a row"),
        ("returns_nothing", "rows.jsonl: --map .*leaves no row"),
        ("returns_kinds", "rows.jsonl row 2: column 'a' is 'text', which cannot be read"),
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


def test_rehearse_reads_mapped_rows(file, tmp_path):
    rows = str(write(tmp_path / "rows.jsonl", *ROWS))
    found = [*rehearse.read_rows(rehearse.Args(train_files=(f"{rows}:2",), rows=3, map=f"{file}:to_verl"), ())]
    assert [where for where, _ in found] == [f"{rows} row {number}" for number in (0, 3, 6)]
    assert found[1][1]["prompt"] == "13+20="


@pytest.mark.runs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", ["train_sync.py", "train_sft.py"])
def test_a_run_with_mapped_rows_is_that_of_such_files(script, file, tmp_path):
    """It resumes exactly, and refuses another content of the function's file."""
    code = tmp_path / "map.py"
    code.write_text("def f(row):\n    return row['wrapped']\n")
    rows = [row | {"response": row["reward_model"]["ground_truth"]} for row in problems("train")[:12]]
    plain, wrapped = write(tmp_path / "plain.jsonl", *rows), tmp_path / "wrapped.jsonl"
    wrapped.write_text("".join(json.dumps({"wrapped": row}) + "\n" for row in rows))
    flags = ["--train-batch-size", 4, "--lr", 1e-3, "--lr-warmup-steps", 0, "--total-training-steps", 4, "--test-freq", 4]
    flags += ["--save-freq", 2, "--max-ckpt-to-keep", 0, "--output-dir", tmp_path, "--experiment-name"]
    run_script(script, *flags, "plain", "--train-files", plain, "--val-files", plain)
    flags += ["mapped", "--train-files", wrapped, "--val-files", wrapped, "--map", f"{code}:f"]
    run_script(script, *flags)
    trained = bits(tmp_path / "mapped", 4)
    assert trained == bits(tmp_path / "plain", 4)
    shutil.rmtree(tmp_path / "mapped" / "step_000004")
    done = run_script(script, *flags)
    assert "resumes after step 2 of 4" in done.stdout and bits(tmp_path / "mapped", 4) == trained
    code.write_text("def f(row):\n    return row['wrapped'] | {}\n")
    refused = run_script(script, *flags, "--total-training-steps", 5, check=False)
    assert refused.returncode == 1 and "the content of --map" in refused.stderr

"""Files of rows, and data sets of the hub: what --train-files names, read with Hugging Face `datasets`."""

import json
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pyarrow as pa

from rl.data.tables import DEMOS, Rows, demo_table
from rl.errors import UserError

WEIGHT = re.compile(r"(.+):([+-]?(?:\d+\.?\d*|\.\d+))")  # a file with its weight; other texts after a colon are a hub config
BLANKS = re.compile(r"\s*")
UNFIT = (pa.ArrowException, OverflowError, UnicodeEncodeError)  # pyarrow raises these if values do not make a column


def read_table(file: str, split: str) -> Rows:
    """The file's rows. split: "train", "val" or "sft", the flag that names it; all but "val" are for training. Raises UserError
    if it cannot be read."""
    if file in DEMOS:
        return demo_table(file, split)
    read = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_json}.get(Path(file).suffix)
    if read is None:
        return _read_hub(file, split)
    if not Path(file).is_file():
        raise UserError(f"{file}: no such file (--{split}-files).")
    try:
        table = read(file)
    except UserError:
        raise
    except Exception as error:  # datasets and pyarrow raise many kinds for a damaged file
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        is_json = read is _read_json
        remedy = "Write it as UTF-8, one JSON object a row." if is_json else "If the file is whole, save that column as text."
        raise UserError(f"{file}: cannot be read ({reason}). {remedy}") from None
    if not len(table):
        raise UserError(f"{file}: the file has no rows (--{split}-files).")
    return table


def _read_parquet(file: str) -> Rows:
    import pyarrow.parquet as pq
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    if not pq.read_metadata(file).num_rows:  # for which load_dataset raises one of many errors
        return Rows(pa.table({}))
    rows = Rows(load_dataset("parquet", data_files=file, split="train").data.table)
    rows.data.validate(full=True)  # raises pyarrow.ArrowInvalid for text that is not UTF-8
    return rows


def _read_json(file: str) -> Rows:
    """The objects in the file, or those of a list in it. `datasets` would make times of dates, and 7 of "007" next to 7."""
    text = Path(file).read_text("utf-8-sig")
    place = 0
    rows = []
    decoder = json.JSONDecoder()
    while (place := BLANKS.match(text, place).end()) < len(text):
        value, place = decoder.raw_decode(text, place)
        rows += value if isinstance(value, list) else [value]
    del text  # as large as the rows
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{file} row {number}: {row!r:.60} is not an object with columns. Correct the row, or remove it.")
    return table_of(file, rows, range(len(rows)))


def table_of(file: str, rows: list[dict], numbers: Sequence[int]) -> Rows:
    """The rows as a table. numbers: those that they have in the file. Raises UserError for values that make no column."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except UNFIT as error:
            raise UserError(
                f"{file}: column {name!r} cannot be read ({error}). Give it values of one kind in all rows, such as text."
            ) from None
    return Rows(pa.table(columns), numbers)


def _read_hub(name: str, split: str) -> Rows:
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    path, _, config = name.partition(":")
    wanted = "test" if split == "val" else "train"
    try:
        return Rows(load_dataset(path, config or None, split=wanted).data.table)
    except Exception as error:  # no network, no such name, no such split: each its own exception in datasets and hub
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--{split}-files {name}: neither a .parquet, .json or .jsonl file nor a hub dataset (name, or name:config) with a "
            f"{wanted!r} split that can be loaded here ({reason})."
        ) from None


def weights_of(words: Sequence[str], split: str = "train") -> tuple[list[str], list[Fraction] | None]:
    """The files, and their weights if one of them has any: those of the others are 1. Raises UserError for those of no use."""
    found = [WEIGHT.fullmatch(word) for word in words]
    if not any(found):
        return list(words), None
    for weight, word in zip(found, words, strict=True):
        if weight and split != "train":
            raise UserError(f"--{split}-files {word}: a file has no weight here, only in --train-files. Leave out the number.")
        if weight and Fraction(weight[2]) <= 0:
            raise UserError(f"--train-files {word}: a weight is above 0. Give such a number, or leave the file out.")
    weights = [Fraction(weight[2] if weight else 1) for weight in found]
    return [weight[1] if weight else word for weight, word in zip(found, words, strict=True)], weights

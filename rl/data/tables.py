"""Tables of rows: read from files or the hub with Hugging Face `datasets`, or made on the spot.

Left out: the meaning of the columns, which is rl/data/columns.py. Importing datasets takes 0.6 s of a core and 80 MB on each
rank, a tenth of a start of the text demo, whose rows are therefore a table of our own.
"""

import bisect
import importlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from rl.errors import UserError
from rl.ranks import launch
from rl.ranks.progress import track

BEHIND_SPACE = re.compile(r"\s*")


def read_table(file: str, split: str):
    """The file as a datasets.Dataset, or as `Rows`. split: "train", "val" or "sft", the flag that names it; all but "val" are
    for training. Raises UserError if it cannot be read."""
    of_demo = "val" if split == "val" else "train"
    if file in ("demo", "demo-calculator"):
        rows = importlib.import_module(f"rl.data.{file.replace('-', '_')}").problems(of_demo)
        return Rows(pa.Table.from_pylist(rows))
    import pyarrow.parquet as pq
    from datasets import Dataset, disable_progress_bars, load_dataset

    disable_progress_bars()
    if file == "demo-vl":
        from rl.data import demo_vl

        return Dataset.from_list(demo_vl.problems(of_demo))
    kind = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}.get(Path(file).suffix)
    if kind is None:
        return _read_hub(file, split)
    if not Path(file).is_file():
        raise UserError(f"{file}: no such file (--{split}-files).")
    if Path(file).stat().st_size == 0:
        raise UserError(f"{file}: the file is empty (--{split}-files).")
    try:
        is_empty = kind == "parquet" and not pq.read_metadata(file).num_rows  # for which load_dataset raises one of many errors
        table = [] if is_empty else load_dataset(kind, data_files=file, split="train")
        if kind == "json" and any("timestamp[" in str(field.type) for field in table.features.arrow_schema):
            table = Dataset.from_list([*_as_written(file)])
    except Exception as error:  # datasets and pyarrow raise many kinds for a damaged file
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise UserError(f"{file}: cannot be read as {kind} ({reason}).") from None
    if not len(table):
        raise UserError(f"{file}: the file has no rows (--{split}-files).")
    return table


def _as_written(file: str) -> Iterator[dict]:
    """The rows of a JSON file, in which text stays text: pyarrow turns a column of dates into times, and an answer would be
    compared with a time."""
    text, place, decoder = Path(file).read_text("utf-8-sig", "surrogateescape"), 0, json.JSONDecoder()
    while (place := BEHIND_SPACE.match(text, place).end()) < len(text):
        value, place = decoder.raw_decode(text, place)
        yield from value if isinstance(value, list) else [value]


def check_as_written(file: str, rows) -> None:
    """Raises UserError for the first value of a JSON file that was not read as it is written. A column has values of one kind:
    "007" next to 7 becomes 7, and an integer of more than 64 bits is rounded. rows: read_table's, all or the first ones, a
    datasets.Dataset."""
    if Path(file).suffix not in (".json", ".jsonl"):
        return
    batches = rows.iter(1000)  # row by row it would take several times as long
    as_read = (dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True))
    numbers = track(range(len(rows)), f"checking {file}", show=launch.here().rank == 0)
    for number, read, written in zip(numbers, as_read, _as_written(file), strict=False):
        for name, value in written.items():
            if not _is_same(read[name], value):
                raise UserError(
                    f"{file} row {number}: column {name!r} is {_short(value)}, but would be read as {_short(read[name])}. Give "
                    "the column values of one kind in all rows, such as text."
                )


def _is_same(read, written) -> bool:
    """Whether two values of JSON are the same. Keys that only other rows have were read as null."""
    if isinstance(written, dict):
        return isinstance(read or {}, dict) and all(_is_same((read or {}).get(key), value) for key, value in written.items())
    if isinstance(written, list):
        alike = isinstance(read or [], list) and len(read or []) == len(written)
        return alike and all(map(_is_same, read or [], written))
    if isinstance(written, bool) or isinstance(read, bool):
        return read is written
    if isinstance(read, (int, float)) and isinstance(written, (int, float)):
        return read == written or (read != read and written != written)  # NaN is what it is
    return type(read) is type(written) and read == written


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_text(file: str, rows) -> None:
    """Raises UserError for the first row with a text that is not UTF-8, in any column: a run would only fail when it draws the
    row. rows: read_table's, all or the first ones."""
    table = rows.with_format("arrow")[:]
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:  # also if only a later row is wrong: the lists of all rows are one array
        for row in range(len(table)):
            if not _is_text(table.slice(row, 1)):
                raise UserError(f"{file} row {row}: its text is not UTF-8. Save the file as UTF-8.") from None


def _is_text(table: pa.Table) -> bool:
    try:
        table.to_pylist()
    except UnicodeDecodeError:
        return False
    return True


def _read_hub(name: str, split: str):
    from datasets import load_dataset

    path, _, config = name.partition(":")
    wanted = "test" if split == "val" else "train"
    try:
        return load_dataset(path, config or None, split=wanted)
    except Exception as error:  # no network, no such name, no such split: each its own exception in datasets and hub
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--{split}-files {name}: neither a .parquet, .json or .jsonl file nor a hub dataset (name, or name:config) with a "
            f"{wanted!r} split that can be loaded here ({reason})."
        ) from None


class FileRows(Sequence):
    """The rows of several files, end to end, or those of them that are used."""

    rows: Sequence[int]  # the numbers of the used rows, over all files

    def __init__(self, files: Sequence[str], split: str):
        """split: "train", "val" or "sft", the flag that names the files. Raises UserError if there are none."""
        self.files = list(files)
        if not self.files:
            raise UserError(f"--{split}-files names no file.")
        self.tables: list = []  # one for each file

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def ends(self) -> list[int]:
        """For each file, the number of rows up to its end."""
        return list(itertools.accumulate(len(table) for table in self.tables))

    def _locate(self, row: int) -> tuple[int, int]:
        """(index of the file, row number in it) of a row number over all files."""
        file = bisect.bisect_right(self.ends, row)
        return file, row - (self.ends[file - 1] if file else 0)

    def _where(self, row: int) -> str:
        file, number = self._locate(row)
        return f"{self.files[file]} row {number}"


class Rows:
    """A table with the methods of datasets.Dataset that rl/data uses."""

    def __init__(self, table: pa.Table):
        self._table = table

    @property
    def column_names(self) -> list[str]:
        return self._table.column_names

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[dict]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def __getitem__(self, row: int) -> dict:
        return self._table.slice(row, 1).to_pylist()[0]

    def select(self, rows: Iterable[int]) -> "Rows":
        return Rows(self._table.take([*rows]))

    def select_columns(self, names: str | list[str]) -> "Rows":
        return Rows(self._table.select([names] if isinstance(names, str) else names))

    def with_format(self, kind: str) -> pa.Table:
        """kind: always "arrow"."""
        return self._table

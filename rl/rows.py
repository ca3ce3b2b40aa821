"""Tables of rows: read from files or the hub with Hugging Face `datasets`, or made on the spot.

Left out: what the columns mean, which is rl/data.py. Importing datasets takes 0.6 s of a core and 80 MB on each rank, a tenth
of what the demo of text has to start: its rows are a table of our own.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from rl.errors import UserError


def read_table(file: str, split: str):
    """The file as a datasets.Dataset, or what stands for one. Raises UserError for what cannot be read."""
    if file == "demo":
        from rl.demo import problems

        return Rows.of(problems(split))
    from datasets import Dataset, disable_progress_bars, load_dataset

    disable_progress_bars()
    if file == "demo-vl":
        from rl import demo_vl

        return Dataset.from_list(demo_vl.problems(split))
    kind = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}.get(Path(file).suffix)
    if kind is None:
        return _read_hub(file, split)
    if not Path(file).is_file():
        raise UserError(f"{file}: no such file (--{split}-files).")
    if Path(file).stat().st_size == 0:
        raise UserError(f"{file}: the file is empty (--{split}-files).")
    try:
        table = load_dataset(kind, data_files=file, split="train")
        if kind == "json" and any("timestamp[" in str(field.type) for field in table.features.arrow_schema):
            table = Dataset.from_list(_as_written(file))
    except Exception as error:  # datasets and pyarrow raise many kinds for a damaged file
        if "no data" in str(error):  # a parquet file of no rows
            raise UserError(f"{file}: the file has no rows (--{split}-files).") from None
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise UserError(f"{file}: cannot be read as {kind} ({reason}).") from None
    if not len(table):
        raise UserError(f"{file}: the file has no rows (--{split}-files).")
    return table


def _as_written(file: str) -> list[dict]:
    """The rows of a JSON file, whose texts stay texts: pyarrow makes times of a column of nothing but dates, and an answer
    would be compared with one."""
    text = Path(file).read_text("utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def check_text(file: str, rows) -> None:
    """Raises UserError for the first of the rows (read_table's, all or the first ones) with a text that is not UTF-8, in any
    column: a run would meet it when the row is drawn."""
    table = rows.with_format("arrow")[:]
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:  # of the first rows too if a later one's list is not text: the lists of all rows lie in one array
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
    wanted = "train" if split == "train" else "test"
    try:
        return load_dataset(path, config or None, split=wanted)
    except Exception as error:  # no network, no such name, no such split: each its own exception in datasets and hub
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"--{split}-files {name}: neither a .parquet, .json or .jsonl file nor a hub dataset (name, or name:config) with a "
            f"{wanted!r} split that can be loaded here ({reason})."
        ) from None


class Rows:
    """datasets.Dataset.from_list, as far as rl/data.py uses it."""

    def __init__(self, table: pa.Table):
        self._table = table

    @staticmethod
    def of(rows: list[dict]) -> "Rows":
        return Rows(pa.Table.from_pylist(rows))

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
        """kind: "arrow", the one there is."""
        return self._table

"""Tables of rows: those of files (rl/data/files.py), or of a demo, which are made on the spot.

Left out: the meaning of the columns, which is rl/data/columns.py.
"""

import importlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

DEMOS = {"demo": "examples.demo.problems", "demo-calculator": "examples.demo.calculator", "demo-vl": "examples.demo.pictures"}


def demo_table(name: str, split: str) -> "Rows":
    """The rows of a demo. split: "val" for validation; all others are for training."""
    demo = importlib.import_module(DEMOS[name])
    return Rows(pa.Table.from_pylist(demo.problems("val" if split == "val" else "train")))


def place(file: str, table, number: int) -> str:
    """The place in its file of a row of the table, from which --map may have left some out."""
    numbers = getattr(table, "numbers", None)
    return f"{file} row {numbers[number] if numbers else number}"


class Rows:
    """A table, in memory or a file that `datasets` keeps on disk for all ranks. Images are as they are stored, not decoded."""

    def __init__(self, data: pa.Table, numbers: Sequence[int] | None = None):
        """numbers: of the rows in their file, by default all from 0 on."""
        self.data = data
        self.numbers = numbers
        self.column_names = data.column_names

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[dict]:
        for batch in self.data.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def __getitem__(self, row: int) -> dict:
        return self.data.slice(row, 1).to_pylist()[0]

    def select(self, rows: range) -> "Rows":
        return Rows(self.data.slice(rows.start, len(rows)), self.numbers and self.numbers[rows.start : rows.stop])

    def select_columns(self, names: list[str]) -> "Rows":
        return Rows(self.data.select(names), self.numbers)

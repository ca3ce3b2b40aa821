"""Tables of rows: those of files (rl/data/files.py), or of a demo, which are made on the spot. Their columns have verl's layout
or GSM8K's: checks of them, and a row's source and ground truth.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from rl.data.args import DataArgs
from rl.errors import UserError

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


GSM8K = "openai/gsm8k"  # the data_source of question and answer, if no column names one
ENVIRONMENT = "environment"  # that of other rows without one, if their environment brings what they lack
NO_SOURCE = "there is no column 'data_source' to choose the reward function by. Add it, with any name if you use --reward"
TRUTHS = {"reward_model", "ground_truth", "answer"}  # columns that may hold the ground truth


def check_columns(file: str, names: Sequence[str], args: DataArgs, brought: frozenset[str] = frozenset()) -> None:
    """Raises UserError unless the columns are verl's layout or question and answer. brought: what rows may lack."""
    columns = {*names}
    prompt_key = args.prompt_key
    has = f"the columns are {', '.join(sorted(columns))}"
    question = {"question"} if brought else {"question", "answer"}
    if prompt_key not in columns and not question <= columns and "prompt" not in brought:
        raise UserError(f"{file}: there is no column {prompt_key!r}; {has}. Name the right one with --prompt-key.")
    if not columns & TRUTHS and "ground_truth" not in brought:
        raise UserError(
            f"{file}: no ground truth: there is no column 'reward_model' (verl's layout), 'ground_truth' or 'answer'; {has}."
        )
    if args.image_key not in (DataArgs.image_key, *columns):
        raise UserError(f"{file}: there is no column {args.image_key!r}; {has}. Name the right one with --image-key.")
    if not columns & {"data_source", "answer"} and "ground_truth" not in brought:
        raise UserError(f"{file}: {NO_SOURCE}; {has}.")


def check_row(where: str, row: dict, brought: frozenset[str] = frozenset()) -> None:
    """Raises UserError if the row has no ground truth, one of no use, or one that no reward function is chosen for. brought:
    what rows may lack."""
    source = row.get("data_source")
    may_lack = "data_source" not in row or "ground_truth" in brought
    if not (isinstance(source, str) and source.strip()) and not (source is None and may_lack):
        raise UserError(f"{where}: data_source is {source!r:.60}. Put a name there, as text; any will do if you use --reward.")
    name, truth = _truth(row)
    if name is None:
        if "ground_truth" in brought:
            return
        found = ", ".join(f"{name} is {row[name]!r:.60}" for name in sorted(TRUTHS & row.keys()))
        raise UserError(
            f"{where}: no ground truth: {found} (of a reward_model, only its ground_truth is read). Fill it in, with any text "
            "if your --reward does not need it, or remove the row."
        )
    if name == "answer" and isinstance(truth, list | dict):
        raise UserError(f"{where}: the answer is {truth!r:.60}. Save it as text, or in a column ground_truth.")
    is_gsm8k = "####" in str(row.get("answer"))
    if "data_source" not in row and "ground_truth" not in brought and not is_gsm8k:  # it would always be scored 0
        raise UserError(f"{where}: the answer has no '####' as GSM8K's have, and {NO_SOURCE}.")


def source_of(row: dict) -> str:
    """The data_source of a row, also of one that names none."""
    return row.get("data_source") or (GSM8K if "####" in str(row.get("answer")) else ENVIRONMENT)


def ground_truth(row: dict) -> Any:
    """The ground truth; None if there is none."""
    name, truth = _truth(row)
    return _end_of(truth) if name == "answer" else truth


def _truth(row: dict) -> tuple[str | None, Any]:
    """Return (the name of the column with the ground truth, what stands there); (None, None) if there is none."""
    of_model = row.get("reward_model")
    of_model = of_model.get("ground_truth") if isinstance(of_model, dict) else None
    answer = row.get("answer")
    answer = None if _is_blank(answer) or _is_blank(_end_of(answer)) else answer
    found = {"reward_model.ground_truth": of_model, "ground_truth": row.get("ground_truth"), "answer": answer}
    return next(((name, truth) for name, truth in found.items() if not _is_blank(truth)), (None, None))


def _end_of(answer: Any) -> str:
    """What is behind the mark of GSM8K's answers; without the mark all of it, where a comma may have a meaning: "(3, 4)"."""
    _, mark, truth = str(answer).rpartition("####")
    return truth.strip().replace(",", "") if mark else truth.strip()


def _is_blank(truth: Any) -> bool:
    is_nan = truth != truth
    return truth is None or is_nan or truth == [] or (isinstance(truth, str) and not truth.strip())

"""The columns of a table in verl's layout or GSM8K's: checks of them, and a row's source and ground truth."""

from typing import Any

import pyarrow as pa

from rl.data.args import DataArgs
from rl.errors import UserError

GSM8K = "openai/gsm8k"  # the data_source of question and answer, if no column names one
ENVIRONMENT = "environment"  # that of other rows without one, if their environment brings what they lack
NO_SOURCE = "there is no column 'data_source' to choose the reward function by. Add it, with any name if you use --reward"
TRUTHS = {"reward_model", "ground_truth", "answer"}  # columns that may hold the ground truth
TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)


def check_columns(file: str, table, args: DataArgs, brought: frozenset[str] = frozenset()) -> None:
    """Raises UserError unless the table is in verl's layout or has question and answer. brought: what rows may lack."""
    columns = set(table.column_names)
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
    if "data_source" in columns and not _is_text(table.data.schema.field("data_source").type):
        raise wrong_source(f"{file} row 0", table[0]["data_source"])


def _is_text(of: pa.DataType) -> bool:
    of = of.value_type if pa.types.is_dictionary(of) else of
    return any(is_text(of) for is_text in TEXTS)


def wrong_source(where: str, source: Any) -> UserError:
    """Return the error of a data_source that is no name."""
    return UserError(f"{where}: data_source is {source!r:.60}. Put a name there, as text; any will do if you use --reward.")


def check_truth(where: str, row: dict, brought: frozenset[str] = frozenset()) -> None:
    """Raises UserError if the row has no ground truth, one of no use, or one that no reward function is chosen for. brought:
    what rows may lack."""
    name, truth = _truth(row)
    if name is None:
        if "ground_truth" in brought:
            return
        found = ", ".join(f"{name} is {row[name]!r:.60}" for name in sorted(TRUTHS & row.keys()))
        raise UserError(
            f"{where}: no ground truth: {found} (of a reward_model, only its ground_truth is read). Fill it in, with any text "
            "if your --reward does not need it, or remove the row."
        )
    if _has_bytes(truth) or (name == "answer" and isinstance(truth, list | dict)):
        raise UserError(
            f"{where}: the ground truth, {name}, is {truth!r:.60}. Save it as text; values of other kinds, but no bytes, can "
            "stand in a column ground_truth."
        )
    if (
        "data_source" not in row and "ground_truth" not in brought and "####" not in str(row.get("answer"))
    ):  # not GSM8K: it would always be scored 0
        raise UserError(f"{where}: the answer has no '####' as GSM8K's have, and {NO_SOURCE}.")


def sources(table, by_row: bool = False) -> pa.ChunkedArray:
    """The data_source of each row, as text. by_row: whether single rows may lack one, because their environment brings it."""
    if by_row:
        lacking = [None] * len(table)
        known = [table.data.column(n).to_pylist() if n in table.column_names else lacking for n in ("data_source", "answer")]
        return pa.chunked_array([[name or default_source({"answer": answer}) for name, answer in zip(*known, strict=True)]])
    if "data_source" not in table.column_names:
        first = table.select_columns(["answer"])[0] if "answer" in table.column_names else {}
        return pa.chunked_array([pa.repeat(default_source(first), len(table))])
    return table.data.column("data_source").cast(pa.string())


def default_source(row: dict) -> str:
    """The data_source of a row that names none."""
    return GSM8K if "####" in str(row.get("answer")) else ENVIRONMENT


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


def _has_bytes(value: Any) -> bool:
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, within))


def _end_of(answer: Any) -> str:
    """What is behind the mark of GSM8K's answers; without the mark all of it, where a comma may have a meaning: "(3, 4)"."""
    _, mark, truth = str(answer).rpartition("####")
    return truth.strip().replace(",", "") if mark else truth.strip()


def _is_blank(truth: Any) -> bool:
    is_nan = truth != truth
    return truth is None or is_nan or truth == [] or (isinstance(truth, str) and not truth.strip())

"""The columns of a table in verl's layout or GSM8K's: checks of them, and a row's source and ground truth."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rl.data.args import DataArgs
from rl.errors import UserError

GSM8K = "openai/gsm8k"  # the data_source of question and answer, if no column names one
TRUTHS = {"reward_model", "ground_truth", "answer"}  # columns that may hold the ground truth


def check_columns(file: str, table, args: DataArgs) -> None:
    """Raises UserError unless the table is in verl's layout or has question and answer."""
    columns, prompt_key = set(table.column_names), args.prompt_key
    has = f"the columns are {', '.join(sorted(columns))}"
    if prompt_key not in columns and not {"question", "answer"} <= columns:
        raise UserError(f"{file}: there is no column {prompt_key!r}; {has}. Name the right one with --prompt-key.")
    if not columns & TRUTHS:
        raise UserError(
            f"{file}: no ground truth: there is no column 'reward_model' (verl's layout), 'ground_truth' or 'answer'; {has}."
        )
    if args.image_key not in (DataArgs.image_key, *columns):
        raise UserError(f"{file}: there is no column {args.image_key!r}; {has}. Name the right one with --image-key.")
    if "data_source" in columns:
        return
    remedy = (
        f"there is no column 'data_source' to choose the reward function by; {has}. Add it, any name will do with --reward."
    )
    if "answer" not in columns:
        raise UserError(f"{file}: {remedy}")
    for number, answer in enumerate(table["answer"]):
        if "####" not in str(answer):  # not GSM8K: it would always be scored 0
            raise UserError(f"{file} row {number}: the answer has no '####' as GSM8K's have, and {remedy}")


def first_with_images(table, name: str) -> int | None:
    """The first row whose images are neither null nor an empty list. Decodes none."""
    column = column_of(table, name)
    is_list = str(column.type).startswith(("list", "large_list"))
    return first_row(pc.greater(pc.fill_null(pc.list_value_length(column), 0), 0) if is_list else pc.is_valid(column))


def column_of(table, name: str) -> pa.ChunkedArray:
    """A column, not turned into Python objects."""
    return table.select_columns(name).with_format("arrow")[:][name]


def first_row(condition) -> int | None:
    """The first row for which the condition is true."""
    found = pc.index(condition, True).as_py()
    return found if found >= 0 else None


def check_truths(file: str, table) -> None:
    """Raises UserError for the first row without a ground truth."""
    missing = pa.chunked_array([[True] * len(table)], pa.bool_())
    for name in TRUTHS & set(table.column_names):
        column = column_of(table, name)
        if name == "reward_model":
            if pa.types.is_string(column.type) and first_row(pc.is_valid(column)) is not None:
                raise UserError(
                    f"{file}: column 'reward_model' holds text, where verl's layout has a struct with ground_truth. Decode it "
                    "(JSON, say) before the file is saved."
                )
            if not pa.types.is_struct(column.type) or column.type.get_field_index("ground_truth") < 0:
                continue
            column = pc.struct_field(column, "ground_truth")
        blank = pc.is_null(column, nan_is_null=True)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            blank = pc.or_kleene(blank, pc.equal(pc.list_value_length(column), 0))
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            truth = pc.replace_substring_regex(column, "(?s)^.*####", "") if name == "answer" else column
            blank = pc.or_kleene(blank, pc.equal(pc.utf8_trim_whitespace(truth), ""))
        missing = pc.and_(missing, blank)
    if (row := first_row(missing)) is not None:
        raise UserError(
            f"{file} row {row}: no ground truth (reward_model.ground_truth, ground_truth and answer are all empty). Fill it "
            "in, with any text if your --reward does not need it, or remove the row."
        )


def data_source(row: dict) -> str:
    return row.get("data_source") or GSM8K


def ground_truth(row: dict) -> Any:
    reward_model = row.get("reward_model")
    of_model = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    for truth in (of_model, row.get("ground_truth")):
        if not (truth is None or (isinstance(truth, str) and not truth.strip())):
            return truth
    _, mark, truth = str(row["answer"]).rpartition("####")
    return truth.strip().replace(",", "") if mark else truth.strip()  # without the mark a comma may have a meaning: "(3, 4)"

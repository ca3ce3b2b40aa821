"""The columns of a table in verl's layout or GSM8K's: checks of them, and a row's source and ground truth."""

from typing import Any

import pyarrow as pa

from rl.data.args import DataArgs
from rl.errors import UserError

GSM8K = "openai/gsm8k"  # the data_source of question and answer, if no column names one
ENVIRONMENT = "environment"  # that of other rows without one, if their environment brings what they lack
NO_SOURCE = "there is no column 'data_source' to choose the reward function by. Add it, with any name if you use --reward"
TRUTHS = {"reward_model", "ground_truth", "answer"}  # columns that may hold the ground truth


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


def check_truth(where: str, row: dict, brought: frozenset[str] = frozenset()) -> None:
    """Raises UserError if the row has no ground truth, or one that no reward function is chosen for. brought: what rows may
    lack."""
    if "ground_truth" in brought:
        return
    if ground_truth(row) is None:
        raise UserError(
            f"{where}: no ground truth: reward_model.ground_truth, ground_truth and answer are all empty (a reward_model of "
            "text is not read). Fill it in, with any text if your --reward does not need it, or remove the row."
        )
    if "data_source" not in row and "####" not in str(row["answer"]):  # not GSM8K: it would always be scored 0
        raise UserError(f"{where}: the answer has no '####' as GSM8K's have, and {NO_SOURCE}.")


def sources(table) -> pa.ChunkedArray:
    """The data_source of each row."""
    if "data_source" not in table.column_names:
        first = table.select_columns(["answer"])[0] if "answer" in table.column_names else {}
        return pa.chunked_array([pa.repeat(default_source(first), len(table))])
    return table.data.column("data_source")


def default_source(row: dict) -> str:
    """The data_source of a row that names none."""
    return GSM8K if "####" in str(row.get("answer")) else ENVIRONMENT


def ground_truth(row: dict) -> Any:
    """The ground truth; None if there is none."""
    of_model = row.get("reward_model")
    of_model = of_model.get("ground_truth") if isinstance(of_model, dict) else None
    answer = row.get("answer")
    truths = (of_model, row.get("ground_truth"), None if _is_blank(answer) else _end_of(str(answer)))
    return next((truth for truth in truths if not _is_blank(truth)), None)


def _end_of(answer: str) -> str:
    """What is behind the mark of GSM8K's answers; without the mark all of it, where a comma may have a meaning: "(3, 4)"."""
    _, mark, truth = answer.rpartition("####")
    return truth.strip().replace(",", "") if mark else truth.strip()


def _is_blank(truth: Any) -> bool:
    is_nan = truth != truth
    return truth is None or is_nan or truth == [] or (isinstance(truth, str) and not truth.strip())

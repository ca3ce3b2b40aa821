"""Prompts from parquet, JSON lines or the hub, in verl's layout or as plain questions, and the endless order they are drawn in.

Rows are read with Hugging Face `datasets` and tokenised when asked for. A row is either verl's (`prompt`: chat messages or a
string, `data_source`, `reward_model.ground_truth`, `extra_info`) or a plain `question` / `answer` pair, GSM8K's own layout:
what follows the last "####" of the answer is the ground truth, and the source is openai/gsm8k unless a column says otherwise.
Left out: images.
"""

import bisect
import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import TemplateError
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from rl.errors import UserError
from rl.ranges import Range


@dataclass
class DataArgs:
    train_files: tuple[str, ...] = ("demo",)
    """Training prompts: .parquet, .json or .jsonl files, hub datasets (name, or name:config), or "demo"; several are
    concatenated."""
    val_files: tuple[str, ...] = ("demo",)
    """Validation prompts, likewise."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: chat messages, or a string that is taken as it is."""
    max_prompt_length: Annotated[int, Range(at_least=1)] = 64
    """Longest prompt in tokens, chat template included."""
    filter_overlong_prompts: bool = False
    """Leave longer prompts out, instead of what --truncation says."""
    truncation: Literal["error", "left", "right"] = "error"
    """What becomes of a longer prompt: stop with a message, or cut tokens off its left or right end."""
    shuffle: bool = True
    """Draw prompts in a new random order each epoch; otherwise in the files' order."""
    train_max_samples: Annotated[int, Range(at_least=1, also=-1)] = -1
    """Take only the first so many training prompts; -1 takes all."""
    val_max_samples: Annotated[int, Range(at_least=1, also=-1)] = -1
    """Take only the first so many validation prompts; -1 takes all."""


@dataclass(frozen=True)
class Prompt:
    ids: list[int]  # token ids, the chat template's generation prompt included
    text: str  # the same, readable
    data_source: str  # chooses the reward function
    ground_truth: Any
    extra_info: dict
    where: str  # "train.parquet row 17", for messages


class PromptOrder:
    """A seeded endless permutation: ticket k is row k % n of epoch k // n, whose order depends on (seed, epoch) alone."""

    def __init__(self, num_prompts: int, seed: int, shuffle: bool = True):
        self.num_prompts, self.seed, self.shuffle = num_prompts, seed, shuffle
        self._permutation = functools.lru_cache(maxsize=4)(self._make_permutation)

    def __call__(self, ticket: int) -> tuple[int, int]:
        """(epoch, index) of the ticket."""
        epoch, place = divmod(ticket, self.num_prompts)
        return epoch, self._permutation(epoch)[place]

    def _make_permutation(self, epoch: int) -> list[int]:
        order = list(range(self.num_prompts))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


class PromptDataset(Sequence):
    """The rows of all files, end to end. Raises UserError for what cannot be used, naming file, row (from 0) and remedy."""

    def __init__(
        self, files: Sequence[str], split: Literal["train", "val"], tokenizer: PreTrainedTokenizerBase, args: DataArgs
    ):
        self.tokenizer, self.args = tokenizer, args
        self.files = list(files)
        if not self.files:
            raise UserError(f"--{split}-files names no file.")
        # Files keep their own columns: casting them to a common schema would change what they say.
        self.tables = [_read(file, split) for file in self.files]
        for file, table in zip(self.files, self.tables, strict=True):
            _check_columns(file, table, args.prompt_key)
        self.ends = list(itertools.accumulate(len(table) for table in self.tables))
        limit = args.train_max_samples if split == "train" else args.val_max_samples
        self.rows = list(range(self.ends[-1] if limit < 0 else min(limit, self.ends[-1])))
        if args.filter_overlong_prompts or args.truncation == "error":
            self.rows = self._measure(f"measuring {split} prompts")
        if not self.rows:
            raise UserError(
                f"{', '.join(self.files)}: no prompt is left of {self.ends[-1]} at --max-prompt-length "
                f"{args.max_prompt_length} and --{split}-max-samples {limit}."
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        file, number, row = self._locate(self.rows[index])
        ids, limit = self._encode(file, number, row), self.args.max_prompt_length
        if len(ids) > limit:
            ids = ids[-limit:] if self.args.truncation == "left" else ids[:limit]
        return Prompt(
            ids=ids,
            text=self.tokenizer.decode(ids),
            data_source=_data_source(row),
            ground_truth=_ground_truth(file, number, row),
            extra_info=row.get("extra_info") or {},
            where=f"{file} row {number}",
        )

    def sources(self) -> dict[str, str]:
        """Every data_source -> where it first stands."""
        found: dict[str, str] = {}
        for file, table in zip(self.files, self.tables, strict=True):
            column = table["data_source"] if "data_source" in table.column_names else ["openai/gsm8k"]
            for number, source in enumerate(column):
                if not isinstance(source, str) or not source:
                    raise UserError(
                        f"{file} row {number}: data_source is {source!r}. Put a name there, any if you use --reward."
                    )
                found.setdefault(source, f"{file} row {number}")
        return found

    def _measure(self, description: str) -> list[int]:
        """The rows whose prompts fit. A longer one is an error before the first step rather than in the middle of a run."""
        fitting, limit = [], self.args.max_prompt_length
        for number in track(self.rows, description=description, disable=len(self.rows) < 5000, transient=True):
            file, row_number, row = self._locate(number)
            length = len(self._encode(file, row_number, row))
            if length <= limit:
                fitting.append(number)
            elif not self.args.filter_overlong_prompts:
                raise UserError(
                    f"{file} row {row_number}: the prompt has {length} tokens, more than --max-prompt-length {limit}. Raise "
                    "it, or leave such rows out with --filter-overlong-prompts, or cut them with --truncation left or right."
                )
        return fitting

    def _locate(self, row: int) -> tuple[str, int, dict]:
        """(file, row number in it, the row) of a row number over all files."""
        which = bisect.bisect_right(self.ends, row)
        number = row - (self.ends[which - 1] if which else 0)
        return self.files[which], number, self.tables[which][number]

    def _encode(self, file: str, number: int, row: dict) -> list[int]:
        key = self.args.prompt_key if self.args.prompt_key in row else "question"
        prompt = row[key]
        if isinstance(prompt, str) and key == self.args.prompt_key:
            ids = self.tokenizer.encode(prompt)
        else:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = self._encode_chat(f"{file} row {number}", key, messages)
        if not ids:
            raise UserError(f"{file} row {number}: the prompt (column {key!r}, --prompt-key) is empty. Remove the row.")
        return ids

    def _encode_chat(self, where: str, key: str, messages: Any) -> list[int]:
        if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
            raise UserError(
                f"{where}: column {key!r} is neither a string nor a list of chat messages ({{role, content}}, both strings). "
                "Name the right column with --prompt-key."
            )
        if not self.tokenizer.chat_template:
            raise UserError(
                f"{where}: the prompt is a chat, but the model's tokenizer has no chat template. Take an instruct model, save "
                "a chat template with the tokenizer, or give prompts as plain strings."
            )
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:  # many templates refuse a system message, or roles that do not alternate
            raise UserError(f"{where}: the model's chat template refuses the messages ({error}). Mend the roles.") from None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


# --------------------------------------------------------------------------------------------------------- reading


def _read(file: str, split: str):
    """The file as a datasets.Dataset."""
    from datasets import Dataset, disable_progress_bars, load_dataset

    disable_progress_bars()
    if file == "demo":
        from rl.demo import problems

        return Dataset.from_list(problems(split))
    kind = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}.get(Path(file).suffix)
    if kind is None:
        return _read_hub(file, split)
    if not Path(file).is_file():
        raise UserError(f"{file}: no such file (--{split}-files).")
    if Path(file).stat().st_size == 0:
        raise UserError(f"{file}: the file is empty (--{split}-files).")
    try:
        table = load_dataset(kind, data_files=file, split="train")
    except Exception as error:  # datasets and pyarrow raise many kinds for a damaged file
        if "no data" in str(error):  # a parquet file of no rows
            raise UserError(f"{file}: the file has no rows (--{split}-files).") from None
        cause = error.__cause__ or error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise UserError(f"{file}: cannot be read as {kind} ({reason}).") from None
    if not len(table):
        raise UserError(f"{file}: the file has no rows (--{split}-files).")
    return table


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


def _check_columns(file: str, table, prompt_key: str) -> None:
    """Raises UserError unless the table is in verl's layout or has question and answer."""
    columns = set(table.column_names)
    has = f"the columns are {', '.join(sorted(columns))}"
    if prompt_key not in columns and not {"question", "answer"} <= columns:
        raise UserError(f"{file}: there is no column {prompt_key!r}; {has}. Name the right one with --prompt-key.")
    if not columns & {"reward_model", "ground_truth", "answer"}:
        raise UserError(
            f"{file}: no ground truth: there is no column 'reward_model' (verl's layout), 'ground_truth' or 'answer'; {has}."
        )
    if "images" in columns and (row := _first_with_images(table)) is not None:
        raise UserError(f"{file} row {row}: the prompt has images, which cannot be used yet. Leave such rows out.")
    if "data_source" in columns:
        return
    remedy = (
        f"there is no column 'data_source' to choose the reward function by; {has}. Add it, any name will do with --reward."
    )
    if "answer" not in columns:
        raise UserError(f"{file}: {remedy}")
    for number, answer in enumerate(table["answer"]):
        if "####" not in str(answer):  # then it is not GSM8K, and would be scored 0 for ever
            raise UserError(f"{file} row {number}: the answer has no '####' as GSM8K's have, and {remedy}")


def _first_with_images(table) -> int | None:
    """The first row whose images are neither null nor an empty list, without decoding any."""
    import pyarrow.compute as pc

    column = table.with_format("arrow")[:]["images"]
    is_list = str(column.type).startswith(("list", "large_list"))
    present = pc.greater(pc.fill_null(pc.list_value_length(column), 0), 0) if is_list else pc.is_valid(column)
    found = pc.index(present, True).as_py()
    return found if found >= 0 else None


def _data_source(row: dict) -> str:
    return row.get("data_source") or "openai/gsm8k"


def _ground_truth(file: str, number: int, row: dict):
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    if row.get("ground_truth") is not None:
        return row["ground_truth"]
    if row.get("answer") is not None:
        _, mark, truth = str(row["answer"]).rpartition("####")
        return truth.strip().replace(",", "") if mark else truth.strip()  # elsewhere a comma may mean something: "(3, 4)"
    raise UserError(f"{file} row {number}: no ground truth (reward_model.ground_truth, ground_truth and answer are all empty).")

"""Prompts from parquet, JSON lines or the hub, in verl's layout or as plain questions, and the endless order they are drawn in.

rl/data/files.py reads the rows; they are tokenised when they are drawn. A row is verl's (`prompt`: chat messages or a string,
`data_source`, `reward_model.ground_truth`, `extra_info`) or a pair of `question` and `answer` in GSM8K's own layout: the text
after the answer's last "####" is the ground truth, and the source is openai/gsm8k unless a column says otherwise. There may be
a column of images, with an "<image>" in the text for each (rl/images.py, rl/data/image_prompts.py).
"""

import bisect
import contextlib
import functools
import itertools
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch.distributed
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from rl.data.args import DataArgs
from rl.data.tables import DEMOS, TRUTHS, Rows, check_columns, check_row, demo_table, ground_truth, place, source_of
from rl.errors import ImageError, UserError
from rl.ranks import dist, launch, watchdog

if TYPE_CHECKING:
    from rl.data.image_prompts import ImagePrep, Images
    from user_processes.tools import Tools

RECORDED = 2000  # characters of a ground truth, at most: that of a program may have megabytes
BEGINNING = 200  # characters of a prompt that are recorded in all steps


@dataclass(frozen=True)
class Prompt:
    ids: list[int]  # token ids, the chat template's generation prompt included
    text: str  # the same, readable
    data_source: str  # chooses the reward function
    ground_truth: Any
    extra_info: dict
    where: str  # "train.parquet row 17", for messages
    images: "Images | None" = None  # if there are any, `ids` has all their tokens, and `text` one for each image
    row: dict = field(default_factory=dict)  # its columns except images; "prompt": messages, or a string to be used as it is


class PromptOrder:
    """A seeded endless permutation: ticket k is row k % n of epoch k // n, whose order depends on (seed, epoch) alone."""

    def __init__(self, num_prompts: int, seed: int | str, shuffle: bool = True):
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


class FileRows(Sequence):
    """The rows of several files, end to end, or those of them that are used."""

    rows: Sequence[int]  # the numbers of the used rows, over all files

    def __init__(self, files: Sequence[str], split: str, args):
        """split: "train", "val" or "sft", the flag that names the files. args: DataArgs or DemonstrationArgs. Raises UserError
        if there are none."""
        self.args = args
        self.files = [*files]
        self.weights = None
        read_table = demo_table
        if {*files} - DEMOS.keys():
            from rl.data.files import read_table, weights_of  # late: the demo's rows are in no file

            self.files, self.weights = weights_of(files, split)
        if not self.files:
            raise UserError(f"--{split}-files names no file. Name one, or leave the flag out.")
        limit = args.val_max_samples if split == "val" else args.train_max_samples
        room = math.inf if limit < 0 else limit
        # Files keep their own columns: casting them to a common schema would change what they say.
        self.tables: list[Rows] = []
        for file in self.files:
            table = read_table(file, split)
            if args.map:
                from rl.data.mapped import mapped  # late: few runs have one

                table = mapped(table, file, args.map, max(1, room))  # with one row there are columns
            self._check_columns(file, table.column_names)
            self.tables.append(table.select(range(min(len(table), room))))
            room -= len(self.tables[-1])
        # For each file, the number of rows up to its end
        self.ends = list(itertools.accumulate(len(table) for table in self.tables))

    def _check_columns(self, file: str, names: Sequence[str]) -> None:
        """Raise UserError unless the file's columns are those that are needed."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    def _locate(self, row: int) -> tuple[int, int]:
        """(index of the file, row number in it) of a row number over all files."""
        file = bisect.bisect_right(self.ends, row)
        return file, row - (self.ends[file - 1] if file else 0)

    def _columns(self, row: int) -> dict:
        file, number = self._locate(row)
        return self.tables[file][number]

    def file_of(self, index: int) -> int:
        """Return the place in `files` of the file of a used row."""
        return self._locate(self.rows[index])[0]

    def _where(self, row: int) -> str:
        file, number = self._locate(row)
        return place(self.files[file], self.tables[file], number)


@dataclass
class Measured:
    """The rows that can be used."""

    kept: array = field(default_factory=lambda: array("q"))  # numbers of the rows that can be used
    truncated: int = 0  # how many of these have prompts that will be cut
    sources: dict[str, list[int]] = field(default_factory=dict)  # data_source -> [its first row, the number of its rows]


def measure(rows: int, what: str, measure_row: Callable[[int, Measured], None]) -> Measured:
    """Return the findings of all ranks of the default group together. measure_row: adds those of a row, or raises UserError for
    one that cannot be used, which is an error here rather than in the middle of a run. Collective."""
    joined = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)
    own = Measured()
    error = None
    part = range(rows * rank // ranks, rows * (rank + 1) // ranks)
    shown = track(part, f"measuring {what}", transient=True, disable=launch.here().rank != 0)
    try:
        with contextlib.closing(shown):  # an error leaves no bar, whose thread could block a later one
            for row in shown:
                measure_row(row, own)
                watchdog.progress()
    except UserError as found:
        error = str(found)
    mine = [[*own.kept], own.truncated, own.sources, error]
    whole = Measured()
    for kept, truncated, sources, error in dist.all_gather_values(mine) if joined else [mine]:
        if error:
            raise UserError(error)
        whole.kept.extend(kept)
        whole.truncated += truncated
        for source, (first, count) in sources.items():
            whole.sources.setdefault(source, [first, 0])[1] += count
    return whole


class PromptDataset(FileRows):
    """The rows of all files, end to end. Raises UserError for a row that cannot be used, with its file, number and remedy."""

    def __init__(
        self,
        files: Sequence[str],
        split: Literal["train", "val"],
        tokenizer: PreTrainedTokenizerBase,
        args: DataArgs,
        prep: "ImagePrep | None" = None,
        environments: "Mapping[str, tuple[Tools | None, frozenset[str]]] | None" = None,
    ):
        """prep: of a model that takes images. environments: the tools that each shows to the model, and what its rows may lack,
        because it brings that: "prompt", "ground_truth". Their names are in a column; that of the only one is empty."""
        self.tokenizer = tokenizer
        self.prep = prep
        self.environments = environments or {"": (None, frozenset())}
        self.by_row = "" not in self.environments
        super().__init__(files, split, args)
        measured = self._measure(f"{split} prompts")
        self.rows = measured.kept
        self.truncated = measured.truncated  # prompts that --truncation cuts
        self._sources = measured.sources
        if not self.rows:
            raise UserError(
                f"{', '.join(self.files)}: no prompt is left of {self.ends[-1]} at --max-prompt-length "
                f"{args.max_prompt_length}. Raise it."
            )

    def _check_columns(self, file: str, names: Sequence[str]) -> None:
        check_columns(file, names, self.args, frozenset().union(*(brought for _, brought in self.environments.values())))

    def __getitem__(self, index: int) -> Prompt:
        row = self._columns(self.rows[index])
        where = self._where(self.rows[index])
        limit = self.args.max_prompt_length
        short = self._encode(self._render(where, row))
        ids, of_row = self._expand(self.rows[index], row, short)
        if len(ids) > limit:
            short = ids = ids[-limit:] if self.args.truncation == "left" else ids[:limit]
        return Prompt(
            ids=ids,
            text=self.tokenizer.decode(short),
            data_source=source_of(row),
            ground_truth=ground_truth(row),
            extra_info=row.get("extra_info") or {},
            where=where,
            images=of_row,
            row={name: value for name, value in row.items() if name != self.args.image_key} | {"prompt": self._asked(row)},
        )

    def sources(self) -> dict[str, str]:
        """Every data_source -> its first row."""
        return {source: self._where(first) for source, (first, _) in self._sources.items()}

    def source_sizes(self) -> dict[str, int]:
        """Every data_source -> the number of its rows, including those whose prompts were left out."""
        return {source: count for source, (_, count) in self._sources.items()}

    def source(self, index: int) -> str:
        return source_of(self._columns(self.rows[index]))

    def about(self, index: int) -> dict:
        """Return the place of a prompt in its file, its ground truth, and its last message if the environment does not make it.
        Long texts are cut."""
        row = self._columns(self.rows[index])
        asked = self._asked(row)
        text = asked if isinstance(asked, str) else asked[-1]["content"] if asked else ""
        known = {"where": self._where(self.rows[index]), "ground_truth": str(ground_truth(row))[:RECORDED]}
        return known | ({"prompt": text[:BEGINNING]} if text else {})

    def _measure(self, what: str) -> Measured:
        """Measure all rows, by the columns that are needed for it."""
        narrow = [table.select_columns(self._wanted(table.column_names)) for table in self.tables]

        def measure_row(row: int, found: Measured) -> None:
            which, number = self._locate(row)
            columns = narrow[which][number]
            text = self._render(self._where(row), columns)
            self._measure_row(found, row, columns, text, self._encode(text))

        return measure(self.ends[-1], what, measure_row)

    def _measure_row(self, found: Measured, row: int, columns: dict, text: "Text", ids: list[int]) -> None:
        where = self._where(row)
        limit = self.args.max_prompt_length
        if not ids and not self._is_brought(columns):
            raise UserError(f"{where}: the prompt makes no token. Remove the row, or check the model's tokenizer.")
        check_row(where, columns, self._of(columns)[1])
        found.sources.setdefault(source_of(columns), [row, 0])[1] += 1
        expanded, of_row = self._expand(row, columns, ids)
        if row == 0:
            _check_tokenizer(self.tokenizer, text.text, ids, where)
        length = len(expanded)
        if length > limit and self.args.filter_overlong_prompts:
            return
        if length > limit and (self.args.truncation == "error" or of_row):
            cut = "lower max_pixels in preprocessor_config.json" if of_row else "cut them with --truncation left or right"
            raise UserError(
                f"{where}: the prompt has {length} tokens, more than --max-prompt-length {limit}. Raise it, or leave "
                f"such rows out with --filter-overlong-prompts, or {cut}."
            )
        found.truncated += length > limit
        found.kept.append(row)

    def _wanted(self, columns: Sequence[str]) -> list[str]:
        key = self.args.prompt_key if self.args.prompt_key in columns else "question"
        used = {key, self.args.image_key, "data_source", *TRUTHS, *(["environment"] if self.by_row else [])}
        wanted = [name for name in columns if name in used]
        return wanted or columns[:1]  # a table without columns has no rows

    def _expand(self, row: int, columns: dict, ids: list[int]) -> "tuple[list[int], Images | None]":
        """The row's token ids with all tokens of its images, and the images (None if there are none)."""
        if self.prep is None:
            if columns.get(self.args.image_key):
                raise UserError(
                    f"{self._where(row)}: the prompt has images, which --model does not take. Leave such rows out, or take a "
                    f"model of images and text (docs/images.md)."
                )
            return ids, None
        from rl import images  # late: few prompts have any

        try:
            of_file = images.places(self.files[self._locate(row)[0]])
            ids, of_row = self.prep.expand(ids, images.files_of(columns.get(self.args.image_key), *of_file))
        except ImageError as error:
            raise UserError(f"{self._where(row)}: {error}. Correct the row, or remove it.") from None
        return ids, of_row if of_row.sources else None

    def _encode(self, text: "Text") -> list[int]:
        """Token ids. The tokenizer may add special tokens to a text that is not whole."""
        return self.tokenizer(text.text, add_special_tokens=not text.is_whole)["input_ids"]

    def _render(self, where: str, row: dict) -> "Text":
        """The row's prompt as the model will read it."""
        key = self.args.prompt_key if self.args.prompt_key in row else "question"
        if self.by_row and row.get("environment") not in [*self.environments]:
            found = repr(row["environment"])[:60] if "environment" in row else "missing"
            raise UserError(
                f"{where}: the column 'environment' is {found}. Put the name of the row's environment there, one of those of "
                f"--env and --tools: {', '.join(self.environments)}."
            )
        tools, brought = self._of(row)
        prompt = self._asked(row)
        if self._is_brought(row):
            return Text("", True)
        is_chat = not isinstance(prompt, str)
        messages = prompt if is_chat else [{"role": "user", "content": prompt}]
        if not (isinstance(messages, list) and messages and all(map(is_message, messages))):
            raise UserError(
                f"{where}: column {key!r} is neither a string nor a list of chat messages ({{role, content}}, both strings), "
                f"but {prompt!r:.60}. Correct the row, or name the right column with --prompt-key."
            )
        if not any(message["content"].strip() for message in messages) and "prompt" not in brought:
            raise UserError(f"{where}: the prompt (column {key!r}, --prompt-key) is empty. Remove the row.")
        if tools:
            try:
                messages = tools.described(messages) if is_chat else tools.check_text(prompt)
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        if not is_chat:
            return Text(prompt, begins_with_bos(self.tokenizer, prompt))
        if self.prep and self.args.image_key in row:
            from rl.images import with_places

            messages = with_places(messages)
        more = {"tools": tools and tools.for_template, "add_generation_prompt": True}
        return Text(render_chat(self.tokenizer, where, messages, **more), True)

    def _asked(self, row: dict) -> Any:
        """The row's prompt: chat messages, or a string that is used as it is; no message if the environment brings it."""
        _, brought = self._of(row)
        if self.args.prompt_key in row:
            prompt = row[self.args.prompt_key]
            return [] if "prompt" in brought and prompt in (None, "", []) else prompt
        question = row.get("question")
        if "prompt" in brought and not question:
            return []
        return [{"role": "user", "content": question}] if isinstance(question, str) else question

    def _is_brought(self, row: dict) -> bool:
        """Whether the environment has to give the row's prompt."""
        return "prompt" in self._of(row)[1] and self._asked(row) == []

    def _of(self, row: dict) -> "tuple[Tools | None, frozenset[str]]":
        """The tools that a row's prompt shows, and what its environment brings."""
        return self.environments[row["environment"] if self.by_row else ""]


def render_chat(tokenizer: PreTrainedTokenizerBase, where: str, messages: list[dict], **more) -> str:
    """The messages as text. more: arguments of apply_chat_template. Raises UserError if there is no template for them."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{where}: the prompt is a chat, but the model's tokenizer has no chat template. Take an instruct model, save "
            "a chat template with the tokenizer, or give prompts as plain strings."
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **more)
    except Exception as error:  # many templates refuse a system message, or roles that do not alternate; some raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"{where}: the model's chat template refuses the messages ({reason:.300}). Fix their roles, or the template."
        ) from None


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], where: str) -> None:
    """Raises UserError if most of the text is lost in its token ids: a tokenizer of other words turns prompts into nothing."""
    for special in tokenizer.get_added_vocab():
        text = text.replace(special, "")
    read = tokenizer.decode(ids, skip_special_tokens=True)
    text, read = ("".join(x.lower().split()) for x in (text, read))
    if sum((Counter(text) & Counter(read)).values()) < len(text) / 2:
        raise UserError(
            f"{where}: the tokenizer loses most of the prompt: {text[:40]!r} is read as {read[:40]!r}. It belongs to another "
            "model, or was saved incompletely: copy the model's own files next to the weights."
        )


class Text(NamedTuple):
    text: str
    is_whole: bool  # has its special tokens: it was rendered by a chat template, or begins with a BOS


def begins_with_bos(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)


def is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)

"""Prompts from parquet, JSON lines or the hub, in verl's layout or as plain questions, and the endless order they are drawn in.

rl/data/tables.py reads the rows; they are tokenised when they are drawn. A row is verl's (`prompt`: chat messages or a string,
`data_source`, `reward_model.ground_truth`, `extra_info`) or a pair of `question` and `answer` in GSM8K's own layout: the text
after the answer's last "####" is the ground truth, and the source is openai/gsm8k unless a column says otherwise. There may be
a column of images, with an "<image>" in the text for each (rl/data/images.py, rl/data/image_prompts.py).
"""

import contextlib
import functools
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow.compute as pc
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from rl.data.args import DataArgs
from rl.data.columns import TRUTHS, check_columns, check_truth, default_source, ground_truth, sources, wrong_source
from rl.data.measured import Measured, measure
from rl.data.tables import FileRows, place, read_table
from rl.errors import ImageError, UserError
from rl.ranks import launch, watchdog

if TYPE_CHECKING:
    from rl.data.image_prompts import ImagePrep, Images
    from rl.data.tools import Tools

BATCH = 512  # prompts to tokenise at once, at most
RECORDED = 2000  # characters of a ground truth, at most: that of a program may have megabytes
BEGINNING = 200  # characters of a prompt that are recorded in all steps
BATCH_SECONDS = 0.5  # batches become smaller if a tokenizer is slow, because the watchdog sees progress after each batch


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


class PromptDataset(FileRows):
    """The rows of all files, end to end. Raises UserError for a row that cannot be used, with its file, number and remedy."""

    def __init__(
        self,
        files: Sequence[str],
        split: Literal["train", "val"],
        tokenizer: PreTrainedTokenizerBase,
        args: DataArgs,
        prep: "ImagePrep | None" = None,
        tools: "Tools | None" = None,
        brought: frozenset[str] = frozenset(),
        by_row: "Mapping[str, tuple[Tools, frozenset[str]]] | None" = None,
    ):
        """prep: of a model that takes images. tools: that the model may call. brought: what rows may lack, because the
        environment brings it: "prompt", "ground_truth". by_row: tools and what is brought by each of several environments,
        whose names are in a column; `brought` is then what any of them brings."""
        self.tokenizer = tokenizer
        self.args = args
        self.prep = prep
        self.brought = brought
        self.tools = tools
        self.by_row = by_row
        super().__init__(files, split)
        limit = args.train_max_samples if split == "train" else args.val_max_samples
        # Files keep their own columns: casting them to a common schema would change what they say.
        room = math.inf if limit < 0 else limit
        for file in self.files:
            table = read_table(file, split)
            if args.map:
                from rl.data.mapped import mapped  # late: few runs have one

                table = mapped(table, file, args.map, max(1, room))  # with one row there are columns
            check_columns(file, table, args, brought)
            table = table.select(range(min(len(table), room)))
            room -= len(table)
            if args.image_key in table.column_names:
                from rl.data import images

                table = images.undecoded(table, args.image_key)
            self.tables.append(table)
        measured = measure(self.ends[-1], functools.partial(self._measure_part, f"measuring {split} prompts"))
        self.rows = measured.kept
        self.truncated = measured.truncated  # prompts that --truncation cuts
        if not self.rows:
            raise UserError(
                f"{', '.join(self.files)}: no prompt is left of {self.ends[-1]} at --max-prompt-length "
                f"{args.max_prompt_length}. Raise it."
            )

    def __getitem__(self, index: int) -> Prompt:
        which, number = self._locate(self.rows[index])
        row = self.tables[which][number]
        where = self._where(self.rows[index])
        (ids,), limit = self._encode([self._render(where, row)]), self.args.max_prompt_length
        short, (ids, of_row) = ids, self._expand(self.rows[index], row, ids)
        if len(ids) > limit:
            short = ids = ids[-limit:] if self.args.truncation == "left" else ids[:limit]
        return Prompt(
            ids=ids,
            text=self.tokenizer.decode(short),
            data_source=row.get("data_source") or default_source(row),
            ground_truth=ground_truth(row),
            extra_info=row.get("extra_info") or {},
            where=where,
            images=of_row,
            row={name: value for name, value in row.items() if name != self.args.image_key} | {"prompt": self._asked(row)},
        )

    def sources(self) -> dict[str, str]:
        """Every data_source -> its first row."""
        found: dict[str, str] = {}
        for file, table in zip(self.files, self.tables, strict=True):
            of_rows = sources(table, bool(self.by_row))
            for source in of_rows.unique().to_pylist():
                is_first = pc.is_null(of_rows) if source is None else pc.equal(of_rows, source)
                where = place(file, table, pc.index(is_first, True).as_py())
                if not isinstance(source, str) or not source.strip():
                    raise wrong_source(where, source)
                found.setdefault(source, where)
        return found

    def source(self, index: int) -> str:
        """The data_source of a prompt."""
        which, number = self._locate(self.rows[index])
        row = self.tables[which][number]
        return row.get("data_source") or default_source(row)

    def about(self, index: int) -> dict:
        """Return the place of a prompt in its file, its ground truth, and its last message if the environment does not make it.
        Long texts are cut."""
        which, number = self._locate(self.rows[index])
        row = self.tables[which][number]
        asked = self._asked(row)
        text = asked if isinstance(asked, str) else asked[-1]["content"] if asked else ""
        known = {"where": self._where(self.rows[index]), "ground_truth": str(ground_truth(row))[:RECORDED]}
        return known | ({"prompt": text[:BEGINNING]} if text else {})

    def source_sizes(self) -> Counter[str]:
        """Every data_source -> the number of its rows, including those whose prompts were left out."""
        sizes: Counter[str] = Counter()
        for table in self.tables:
            counted = sources(table, bool(self.by_row)).value_counts()
            sizes.update({of["values"]: of["counts"] for of in counted.to_pylist()})
        return sizes

    def _measure_part(self, description: str, part: range, found: Measured) -> None:
        rows = self._rendered(description, part)
        size = 1
        started = time.monotonic()
        while batch := list(itertools.islice(rows, size)):
            for (row, columns, text), ids in zip(batch, self._encode([text for _, _, text in batch]), strict=True):
                self._measure_row(found, row, columns, text, ids)
            watchdog.progress()
            size = min(BATCH, 2 * size) if time.monotonic() - started < BATCH_SECONDS else max(1, size // 2)
            started = time.monotonic()

    def _measure_row(self, found: Measured, row: int, columns: dict, text: "Text", ids: list[int]) -> None:
        where = self._where(row)
        limit = self.args.max_prompt_length
        if not ids and not self._is_brought(columns):
            raise UserError(f"{where}: the prompt makes no token. Remove the row, or check the model's tokenizer.")
        check_truth(where, columns, self._of(columns)[1])
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

    def _rendered(self, description: str, part: range) -> Iterator[tuple[int, dict, "Text"]]:
        """(row number over all files, its columns, the prompt's text) of this rank's rows."""
        rows = itertools.chain.from_iterable(self._tables_of(part))
        shown = track(part, description, transient=True, disable=launch.here().rank != 0)
        with contextlib.closing(shown):  # an error leaves no bar, whose thread could block a later one
            for number, row in zip(shown, rows, strict=True):
                yield number, row, self._render(self._where(number), row)

    def _tables_of(self, part: range) -> Iterator[Iterable[dict]]:
        """The rows with these numbers over all files, file by file."""
        first = 0
        for table, end in zip(self.tables, self.ends, strict=True):
            its = range(max(part.start, first) - first, min(part.stop, end) - first)
            if its:
                yield table.select_columns(self._wanted(table.column_names)).select(its)
            first = end

    def _wanted(self, columns: Sequence[str]) -> list[str]:
        """The columns that a row is measured by. Others may be large, such as images that `datasets` would decode."""
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
        from rl.data import images  # late: few prompts have any

        try:
            of_file = images.places(self.files[self._locate(row)[0]])
            ids, of_row = self.prep.expand(ids, images.files_of(columns.get(self.args.image_key), *of_file))
        except ImageError as error:
            raise UserError(f"{self._where(row)}: {error}. Correct the row, or remove it.") from None
        return ids, of_row if of_row.sources else None

    def _encode(self, texts: Sequence["Text"]) -> list[list[int]]:
        """Token ids of each text. The tokenizer may add special tokens to a text that is not whole."""
        ids: list[list[int]] = [[]] * len(texts)
        for is_whole in (False, True):
            chosen = [i for i, text in enumerate(texts) if text.is_whole == is_whole]
            if chosen:
                encoded = self.tokenizer([texts[i].text for i in chosen], add_special_tokens=not is_whole)
                for i, of_text in zip(chosen, encoded["input_ids"], strict=True):
                    ids[i] = of_text
        return ids

    def _render(self, where: str, row: dict) -> "Text":
        """The row's prompt as the model will read it."""
        key = self.args.prompt_key if self.args.prompt_key in row else "question"
        if self.by_row and row.get("environment") not in [*self.by_row]:
            found = repr(row["environment"])[:60] if "environment" in row else "missing"
            raise UserError(
                f"{where}: the column 'environment' is {found}. Put the name of the row's environment there, one of those of "
                f"--env and --tools: {', '.join(self.by_row)}."
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
            from rl.data.images import with_places

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
        return self.by_row[row["environment"]] if self.by_row else (self.tools, self.brought)


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

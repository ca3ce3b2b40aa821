"""Conversations to imitate: verl's column `messages`, or a prompt and a response; every answer of the assistant is trained.

The text that the chat template adds for an answer, after the generation prompt, is trained up to the end token; a policy never
samples what follows, such as Qwen's line break. Each part is tokenised by itself, so that a prompt has the same tokens as in
training by reward. Left out: images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.prompts import FileRows, Measured, begins_with_bos, is_message, measure, render_chat
from rl.errors import UserError
from rl.parts import Part
from rl.ranges import Content, MayChange, Range
from user_processes.files import check_code


@dataclass(frozen=True)
class DemonstrationArgs(Part):
    """Conversations to train and to validate on."""

    _field = "data"

    train_files: MayChange[tuple[str, ...]] = ("demo",)
    """Conversations: .parquet, .json or .jsonl files, hub datasets (name, or name:config), or "demo"; several are
    concatenated. A number after a colon is a weight, as in training by reward: a.parquet:2 b.jsonl:1."""
    val_files: tuple[str, ...] = ()
    """Conversations to validate on, in the same forms. Default: those of the demo, or none."""
    map: Annotated[str | None, Content("code")] = None
    """Your own function of a row, as path/to/file.py:function, as in training by reward."""
    messages_key: str = "messages"
    """Column that holds a conversation: chat messages, of which each of the assistant's is trained."""
    prompt_key: str = "prompt"
    """Column of the prompt where there are no messages: chat messages, or a string that is used as it is."""
    response_key: str = "response"
    """Column of the response to the prompt."""
    max_length: Annotated[int, Range(at_least=2)] = 512
    """Longest conversation, in tokens."""
    filter_overlong_prompts: bool = False
    """Leave out longer conversations, which are an error otherwise."""
    shuffle: bool = True
    """Draw conversations in a new random order each epoch, instead of the order of the files."""
    train_max_samples: Annotated[int, Range(at_least=1, also=-1)] = -1
    """Number of training conversations to use, from the first one on; -1 uses all."""
    val_max_samples: Annotated[int, Range(at_least=1, also=-1)] = -1
    """Number of validation conversations to use, from the first one on; -1 uses all."""

    def check(self, args) -> None:
        """Raise UserError for a --map that names no file."""
        if self.map:
            check_code("--map", self.map, "function")


class Demonstration(NamedTuple):
    ids: np.ndarray  # [n] int32
    trained: np.ndarray  # [n] bool; never the first token, which nothing predicts


class Demonstrations(FileRows):
    """The rows of all files, end to end. Raises UserError for a row that cannot be used, with its file, number and remedy."""

    prep = None  # for images, which conversations do not have
    limit = "--max-length"  # of a conversation, in messages
    remedy = "See --messages-key, --prompt-key and --response-key."  # where columns are missing

    def __init__(
        self,
        files: Sequence[str],
        split: str,
        tokenizer: PreTrainedTokenizerBase,
        args: DemonstrationArgs,
        end_tokens: set[int],
    ):
        """split: as in read_table. end_tokens: those that end a response of the model."""
        self.tokenizer, self.end_tokens = tokenizer, end_tokens
        super().__init__(files, split, args)
        self.rows = measure(self.ends[-1], f"{split} conversations", self._measure_row).kept
        if not len(self.rows):
            raise UserError(
                f"{', '.join(self.files)}: no conversation has at most {self.limit} {args.max_length} tokens. Raise it."
            )

    def __getitem__(self, index: int) -> Demonstration:
        return self._read(self.rows[index])

    def _check_columns(self, file: str, names: Sequence[str]) -> None:
        args = self.args
        if not (args.messages_key in names or {args.prompt_key, args.response_key} <= {*names} or file == "demo"):
            raise UserError(
                f"{file}: there is no column {args.messages_key!r}, nor {args.prompt_key!r} with {args.response_key!r}; the "
                f"columns are {', '.join(sorted(names))}. {self.remedy}"
            )

    def _measure_row(self, row: int, found: Measured) -> None:
        length = len(self._read(row).ids)
        if length <= self.args.max_length:
            found.kept.append(row)
        elif not self.args.filter_overlong_prompts:
            raise UserError(
                f"{self._where(row)}: the conversation has {length} tokens, more than {self.limit} {self.args.max_length}. "
                "Raise it, or leave such rows out with --filter-overlong-prompts."
            )

    def _read(self, row: int) -> Demonstration:
        """The row's tokens, and which of them are trained."""
        columns = self._columns(row)
        messages = self._messages(row, columns)
        pieces = self._plain(columns) if messages is None else self._pieces(row, messages)
        ids, trained = [], []
        for tokens, is_answer in pieces:
            count = self._up_to_end(tokens, row) if is_answer else 0
            ids += tokens
            trained += [True] * count + [False] * (len(tokens) - count)
        if not trained or trained[0]:
            raise UserError(f"{self._where(row)}: nothing is in front of the response. Give it a prompt.")
        return Demonstration(np.array(ids, np.int32), np.array(trained, bool))

    def _up_to_end(self, tokens: list[int], row: int) -> int:
        """The number of tokens of an answer that are trained: up to the last end token."""
        ends = [place for place, token in enumerate(tokens) if token in self.end_tokens]
        if ends:
            return ends[-1] + 1
        named = ", ".join(map(repr, self.tokenizer.convert_ids_to_tokens(sorted(self.end_tokens))))
        last = self.tokenizer.convert_ids_to_tokens(tokens[-1:])
        raise UserError(
            f"{self._where(row)}: the chat template ends an answer with {last}, and the model's end tokens are {named}: "
            "responses would not end there. Add the template's token to eos_token_id in generation_config.json."
        )

    def _columns(self, row: int) -> dict:
        columns = super()._columns(row)
        if self.files[self._locate(row)[0]] == "demo":  # its rows have the right sums for graders
            columns = columns | {self.args.response_key: columns["reward_model"]["ground_truth"]}
        response = columns.get(self.args.response_key)
        if columns.get(self.args.messages_key) is None and not isinstance(response, str):
            raise UserError(
                f"{self._where(row)}: the response is {response!r:.60}, not text, and there is no conversation. Correct the "
                "row, or see --response-key and --messages-key."
            )
        return columns

    def _messages(self, row: int, columns: dict) -> list[dict] | None:
        """The conversation; None if the prompt is a string."""
        args = self.args
        messages = columns.get(args.messages_key)
        is_apart = messages is None  # the prompt, and its response
        messages = columns.get(args.prompt_key) if is_apart else messages
        if is_apart and isinstance(messages, str):
            return None
        if not (isinstance(messages, list) and all(map(is_message, messages))):
            raise UserError(
                f"{self._where(row)}: a conversation is a list of {{role, content}}, both strings; this one is "
                f"{messages!r:.60}. Correct the row."
            )
        return [*messages, {"role": "assistant", "content": columns[args.response_key]}] if is_apart else messages

    def _plain(self, columns: dict) -> Iterator[tuple[list[int], bool]]:
        """Tokens of a prompt that is used as it is, with one BOS if the tokenizer adds one, and tokens of its response."""
        prompt = columns[self.args.prompt_key]
        has_bos = begins_with_bos(self.tokenizer, prompt)
        yield self.tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"], False
        yield self._encode(columns[self.args.response_key] + (self.tokenizer.eos_token or "")), True

    def _pieces(self, row: int, messages: list[dict]) -> Iterator[tuple[list[int], bool]]:
        """(tokens, whether they are an answer) for each of the pieces that make up the conversation."""
        whole = self._render(row, messages)
        done = 0
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(row, messages[:turn], add_generation_prompt=True)
            after = self._render(row, messages[: turn + 1])
            if not (after.startswith(before) and whole.startswith(after)):
                raise UserError(
                    f"{self._where(row)}: the chat template writes message {turn} differently if others follow (some templates "
                    "leave out earlier thoughts). Make a row of each answer."
                )
            yield self._encode(whole[done : len(before)]), False
            yield self._encode(whole[len(before) : len(after)]), True
            done = len(after)
        if not done:
            raise UserError(f"{self._where(row)}: no message is the assistant's, so nothing can be learnt. Remove the row.")

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _render(self, row: int, messages: list[dict], **more) -> str:
        return render_chat(self.tokenizer, self._where(row), messages, **more)

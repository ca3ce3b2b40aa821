"""Validation files with a name or a sampling of their own: --val-files aime=aime.parquet:n=16:temperature=0.6 gsm8k.parquet."""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from rl.data.prompts import FileRows
from rl.errors import UserError
from rl.generation.engine import SamplingArgs
from rl.ranges import check

FORM = re.compile(r"(?:([\w.-]+)=)?(.+?)((?::(?:n|temperature|top_p|length)=[^:]*)*)")
FLAGS = {"n": "val_n", "temperature": "val_temperature", "top_p": "val_top_p", "length": "max_response_length"}


class ValSet(NamedTuple):
    """How a file's prompts are validated."""

    name: str  # in place of the rows' data_source in metrics; empty: theirs
    sampling: SamplingArgs  # whose val_* and max_response_length are the file's


class ValSets:
    """The sets of a run's validation files, by row."""

    def __init__(self, words: Sequence[str], sampling: SamplingArgs):
        """words: of --val-files; sampling: of the run. Raise UserError for what cannot be used."""
        self.files: list[str] = []
        self._sets: list[ValSet] = []
        for word in words:
            name, file, options = FORM.fullmatch(word).groups()
            self.files.append(file)
            self._sets.append(ValSet(name or "", _changed(sampling, options, word)))

    @property
    def longest(self) -> int:
        """The tokens of the longest response."""
        return max(of.sampling.max_response_length for of in self._sets)

    def of(self, rows: FileRows, index: int) -> ValSet:
        """Return the set of a row. rows: the validation data, which was read from `files`."""
        return self._sets[rows.file_of(index)]


def _changed(sampling: SamplingArgs, options: str, word: str) -> SamplingArgs:
    try:
        pairs = [option.split("=") for option in options.split(":")[1:]]
        values = {FLAGS[name]: int(value) if name in ("n", "length") else float(value) for name, value in pairs}
    except ValueError:
        wrong = "n and length are whole numbers, temperature and top_p are numbers"
        raise UserError(f"--val-files {word}: {wrong}. Correct it.") from None
    changed = dataclasses.replace(sampling, **values)
    try:
        check(changed)
    except UserError as error:
        raise UserError(f"--val-files {word}: {error}") from None
    return changed

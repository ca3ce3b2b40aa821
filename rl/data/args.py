"""The flags of training and validation data."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from rl.parts import Part
from rl.ranges import Content, MayChange, Range

CALCULATOR = "demo-calculator"  # the model and the data of the demo with a tool


@dataclass(frozen=True)
class DataArgs(Part):
    """Training and validation data."""

    _field = "data"

    train_files: MayChange[tuple[str, ...]] = ("demo",)
    """Training prompts: .parquet, .json or .jsonl files, hub datasets (name, or name:config), "demo" or "demo-vl"; several are
    concatenated. "demo" with --model demo-vl means demo-vl. A number after a colon is a weight: a.parquet:2 b.jsonl:1 draws two
    of three prompts from a.parquet, however many rows it has, and walks through each file again and again. A file without a
    number has the weight 1 then, and an epoch is as many prompts as there are rows."""
    val_files: tuple[str, ...] = ("demo",)
    """Validation prompts, in the same forms but without weights. A file may have a name for its metrics, and its own values of
    --val-n, --val-temperature, --val-top-p and --max-response-length: aime=aime.parquet:n=16:temperature=0.6:length=8192."""
    map: Annotated[str | None, Content("code")] = None
    """Your own function of a row, as path/to/file.py:function. It gets each row of all files as a dict, and returns the row as
    the other flags are to find it, or None to leave it out. The rows that it returns are in each rank's memory."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: chat messages, or a string that is used as it is. A string without a BOS gets one if the
    tokenizer adds one."""
    image_key: str = "images"
    """Column that holds the prompt's images, if any: bytes, paths, or images as `datasets` stores them. Each needs an "<image>"
    in the prompt."""
    max_prompt_length: Annotated[int, Range(at_least=1)] = 64
    """Longest prompt, in tokens, with the chat template and all tokens of its images."""
    filter_overlong_prompts: bool = False
    """Leave out longer prompts, whatever --truncation says."""
    truncation: Literal["error", "left", "right"] = "error"
    """What to do with a longer prompt: stop with an error, or cut tokens off its left or right end. The chat template's
    generation prompt is at the right end. A prompt with images is never cut."""
    shuffle: bool = True
    """Draw prompts in a new random order each epoch, instead of the order of the files."""
    train_max_samples: Annotated[int, Range(at_least=1, also=-1)] = -1
    """Number of training prompts to use, from the first one on; -1 uses all."""
    val_max_samples: Annotated[int, Range(at_least=1, also=-1)] = -1
    """Number of validation prompts to use, from the first one on; -1 uses all."""

    def check(self, args) -> None:
        """Raise UserError for a --map that names no file."""
        if self.map:
            from user_processes.files import check_code  # late: few runs have code of their own

            check_code("--map", self.map, "function")


def demo_files(model: str, files: tuple[str, ...]) -> tuple[str, ...]:
    """The files, in which "demo" becomes the rows of the demo that is trained."""
    return tuple(re.sub("^demo(?=$|:)", model, file) if model in ("demo-vl", CALCULATOR) else file for file in files)

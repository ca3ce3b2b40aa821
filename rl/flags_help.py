"""--help and --help-all: the flags in groups, with their kinds, ranges, texts and defaults.

Left out: parsing (rl/flags.py).
"""

import ast
import dataclasses
import inspect
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from rl import parts
from rl.ranges import Range, flag, marks

# Fields whose flags --help shows, in addition to those that a copy of a script adds; --help-all shows every flag
COMMON = {
    *("model", "total_training_steps", "total_epochs", "test_freq"),
    *("train_files", "val_files", "max_prompt_length"),
    "reward",
    *("adv_estimator", "loss_mode", "kl_loss_coef"),
    *("train_batch_size", "ppo_mini_batch_size", "publish_every", "staleness_threshold", "generators"),
    *("engine", "rollout_n", "max_response_length", "temperature", "rollout_tp"),
    *("lr", "gradient_checkpointing", "lora_rank"),
    *("experiment_name", "output_dir", "logger", "save_freq"),
}
ONLY_COMMON = "These are the common flags. All flags: --help-all."
AGAIN = "--from-run runs/a takes the flags of an earlier run, of this script or another; those on the command line go first."
BOOLEANS = "--shuffle is short for --shuffle True, --no-shuffle for --shuffle False, likewise for every boolean flag."
# The groups that --help shows first, and their order there
FIRST = ("script", "run", "data", "demonstration", "reward", "algorithm", "batch", "supervised", "schedule", "split", "engine")
FIRST += ("learner", "optimizer")


def show(flags: type, description: str, defaults: dict, show_all: bool) -> NoReturn:
    """Print the flags on the node's first rank, and end the process. show_all: all flags, not only common ones and a fork's."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            print(*_help(flags, description, defaults, show_all), sep="\n", flush=True)
        except BrokenPipeError:  # as in `--help | head`: Python must not flush the rest at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _help(flags: type, description: str, defaults: dict, show_all: bool) -> Iterator[str]:
    yield f"usage: {os.path.basename(sys.argv[0])} [--FLAG VALUE ...]\n\n{description.strip()}\n"
    yield f"{AGAIN}\n{BOOLEANS}" if show_all else f"{ONLY_COMMON}\n{AGAIN}\n{BOOLEANS}"
    leaves = parts.leaves(flags)
    limits = marks(flags, Range)
    width = max(40, shutil.get_terminal_size().columns - 8)
    for title, part, names in _groups(flags):
        show_group = show_all or not part.__module__.startswith("rl.")
        shown = [name for name in names if show_group or name in COMMON]
        about, texts = _texts(part)
        if shown:
            yield f"\n{title}:"
            yield from (f"  {line}".rstrip() for line in [*textwrap.wrap(about, width + 4), ""] if about)
        for name in shown:
            limit = f" ({limits[name]})" if name in limits else ""
            yield f"  {flag(name)} {_kind(leaves[name].type)}{limit}"
            text = texts.get(name, "")
            default = defaults.get(name, leaves[name].default)
            if default not in (dataclasses.MISSING, None, ()):  # the help text explains these
                text += f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
            yield from (f"      {line}" for line in textwrap.wrap(text.strip(), width, break_on_hyphens=False))


def _groups(flags: type) -> list[tuple[str, type, list[str]]]:
    """Return the title, the dataclass and the fields of each group, in the order of --help."""
    left = dict(parts.leaves(flags))
    groups = []
    for owner in [*dict.fromkeys(leaf.owner for leaf in left.values() if leaf.path), flags]:
        for part in owner.__mro__:
            names = [name for name in vars(part).get("__annotations__", {}) if name in left and left[name].owner is owner]
            left = {name: leaf for name, leaf in left.items() if name not in names}
            words = re.sub(r"\B([A-Z])", r"-\1", part.__name__.removesuffix("Args")).lower()
            title = "script" if part is flags or not words else vars(part).get("_title", words)
            if names:
                groups.append((title, part, names))
    return sorted(groups, key=lambda group: FIRST.index(group[0]) if group[0] in FIRST else len(FIRST))


def _kind(hint: Any) -> str:
    """Return how --help shows a flag's value: INT, True|False, the choices, or [STR ...] for any number of values."""
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    parts = "|".join(_kind(part) for part in get_args(hint) if part not in (NoneType, ...))
    if get_origin(hint) in (tuple, list):
        return f"[{parts} ...]"
    return parts or ("True|False" if hint is bool else hint.__name__.upper())


def _texts(part: type) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of the dataclass's docstring, and the string below each field."""
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
    except (OSError, TypeError):  # created at run time, or typed interactively
        return "", {}
    texts = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(source.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    return (ast.get_docstring(source) or "").partition("\n\n")[0], texts

"""The command line: flags with their ranges, in groups, and one message for what cannot work.

A flag is a field of a dataclass. Each component has a dataclass of its own, and a script's Args inherits them all. A number's
range is in its type, and what flags refuse of each other in a method `check` of the dataclass (rl/ranges.py). All are checked
before anything is loaded. A flag that can have no effect is a warning (rl/flag_needs.py). A boolean flag can be written
--shuffle, --no-shuffle, --shuffle True or --shuffle=false.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import Annotated, TypeVar, get_args, get_type_hints

import tyro

from rl import flag_needs, flag_words
from rl.errors import UserError
from rl.ranges import check, flag, ranges, refuse_known
from rl.ranks import launch, process

Flags = TypeVar("Flags")

BOOLEANS = "--shuffle is short for --shuffle True, --no-shuffle for --shuffle False, likewise for every boolean flag."
# The groups that --help shows first, and their order there
FIRST = ("script", "run", "data", "reward", "algorithm", "batch", "schedule", "split", "engine", "learner", "optimizer")
CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)


def parse(flags: type[Flags], description: str | None = None) -> Flags:
    """The command line as an instance of the dataclass. Ends the process with one message if it cannot be used."""
    try:
        launch.check()
        return read(flags, description)
    except UserError as error:
        process.fail(error)


def read(
    flags: type[Flags], description: str | None = None, args: Sequence[str] | None = None, defaults: dict | None = None
) -> Flags:
    """`parse` for other callers: raises UserError. args: the command line; by default this process's. defaults: of fields,
    instead of the class's own."""
    args = _spell_out_booleans(flags, sys.argv[1:] if args is None else args)
    refuse_known(flags, args)
    errors, is_first = io.StringIO(), os.environ.get("LOCAL_RANK", "0") == "0"
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(sys.stdout if is_first else io.StringIO()):
        try:
            described = f"{(description or '').strip()}\n\n{BOOLEANS}"
            groups = tyro.cli(_grouped(flags, defaults or {}), args=args, description=described, config=CONFIG)
        except SystemExit as end:
            if not end.code:  # --help
                raise
            raise UserError(_summary(errors.getvalue())) from None
    values = {name: value for group in vars(groups).values() for name, value in vars(group).items()}
    parsed = flags(**values)
    check(parsed)
    flag_needs.warn(flag_needs.without_effect(parsed, flag_needs.given(flags, args)).values())
    return parsed


# -------------------------------------------------------------------------------------------------------- for tyro


def _grouped(flags: type, defaults: dict) -> type:
    """The dataclass as one of dataclasses, a field for each that it is made of: tyro gives each a title in --help."""
    hints, limits = get_type_hints(flags, include_extras=True), ranges(flags)
    fields = {field.name: field for field in dataclasses.fields(flags)}
    groups = []
    for part in flags.__mro__:
        names = [name for name in vars(part).get("__annotations__", {}) if name in fields]
        own, docs = [], _help_texts(part) if names else {}
        for name in names:
            field = fields.pop(name)
            shown = f"{_kind(hints[name])} ({limits[name]})" if name in limits else None
            default = defaults.get(name, field.default)
            default_shown = "" if default in (None, ()) else None  # the text says what that does
            arg = tyro.conf.arg(help=docs.get(name, ""), metavar=shown, help_behavior_hint=default_shown)
            hint = Annotated[hints[name], arg]
            factory = dataclasses.MISSING if name in defaults else field.default_factory
            own.append((name, hint, dataclasses.field(default=default, default_factory=factory)))
        if own:
            words = re.sub(r"\B([A-Z])", r"_\1", part.__name__.removesuffix("Args")).lower()
            title = "script" if part is flags or not words else words
            group = make_dataclass(title, own)
            group.__doc__ = _first_paragraph(part)
            groups.append((title, group))
    groups.sort(key=lambda group: FIRST.index(group[0]) if group[0] in FIRST else len(FIRST))
    return make_dataclass(flags.__name__, groups)


def _kind(hint) -> str:
    """ "INT" or "FLOAT"."""
    inner = get_args(hint)[0]
    return (inner if isinstance(inner, type) else get_args(inner)[0]).__name__.upper()


def _first_paragraph(part: type) -> str:
    text = inspect.cleandoc(part.__doc__ or "")
    return "" if text.startswith(f"{part.__name__}(") else text.partition("\n\n")[0]  # dataclass writes a signature of its own


def _help_texts(part: type) -> dict[str, str]:
    """Field -> the string below it."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body
    except (OSError, TypeError):  # typed in at a prompt, or not Python
        return {}
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _spell_out_booleans(flags: type, args: Sequence[str]) -> list[str]:
    """The arguments with each boolean flag followed by True or False, as tyro is set up to expect."""
    booleans = {flag(name) for name, hint in get_type_hints(flags).items() if hint in (bool, bool | None)}
    spelled, rest = [], list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name.startswith("--no-") and "--" + name[5:] in booleans and not equals:
            spelled += ["--" + name[5:], "False"]
        elif name in booleans:
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
            spelled += [name, value.capitalize()]
        else:
            spelled.append(arg)
    return spelled


def _summary(box: str) -> str:
    """What tyro says in a box of several lines, in one."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines()[1:]:  # the first is a title
        text = line.strip(" │╭╮╰╯")
        if text and not text.strip("─-"):
            sections.append([])
        elif text:
            sections[-1].append(text)
    said = [section for section in sections if section] or [["the command line cannot be read"]]
    cause = " ".join(said[0]).partition(" Got errors:")[0].removeprefix("Error parsing ").rstrip(".")
    similar = list(dict.fromkeys(re.findall(r"^--[\w-]+", "\n".join(itertools.chain(*said[1:-1])), re.MULTILINE)))
    if "nrecognized" not in cause:
        return f"{cause}. --help lists all flags."
    hint = flag_words.hint(re.findall(r"--[\w-]+", cause)) or (f" Similar: {', '.join(similar)}." if similar else "")
    return f"{cause}.{hint} --help lists all flags."

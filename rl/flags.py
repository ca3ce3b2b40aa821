"""The command line: flags with their ranges, in groups, and one message for what cannot work.

A flag is a field of a dataclass. Each component has a dataclass of its own, and a script's Args inherits them all. A number's
range is in its type, and a method `check` of the dataclass refuses what does not go together (rl/ranges.py). All flags are
checked before anything is loaded. A flag that can have no effect is a warning (rl/flag_needs.py). Names that are explained or
renamed are in rl/flag_words.py. A boolean flag can be written --shuffle, --no-shuffle, --shuffle True or --shuffle=false.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from rl import flag_needs, flag_words
from rl.errors import UserError
from rl.ranges import Range, Unavailable, check, flag
from rl.ranks import launch, process

Flags = TypeVar("Flags")

BOOLEANS = "--shuffle is short for --shuffle True, --no-shuffle for --shuffle False, likewise for every boolean flag."
# The groups that --help shows first, and their order there
FIRST = ("script", "run", "data", "reward", "algorithm", "batch", "schedule", "split", "engine", "learner", "optimizer")


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
    names = {field.name for field in dataclasses.fields(flags)}
    words = flag_words.current(sys.argv[1:] if args is None else args, names)
    if {"-h", "--help", "--help-all"} & {*words}:
        _print_help(flags, description, defaults or {}, show_all="--help-all" in words)
    found, unknown = _parser(flags, defaults or {}).parse_known_args(words)
    if unknown:
        raise UserError(_unknown(flags, unknown))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(found).items()}
    parsed = flags(**(defaults or {}) | given)
    check(parsed)
    flag_needs.warn(flag_needs.without_effect(parsed, given).values())
    return parsed


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}. --help-all lists all flags.")


def _parser(flags: type, defaults: dict, show_all: bool = False, **shown) -> _Parser:
    """The parser of the dataclass; what it returns has the given flags alone. shown: the texts of --help."""
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=6)
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=layout, **shown)
    hints = get_type_hints(flags, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(flags)}
    for title, part, names in _groups(flags):
        texts = _help_texts(part) if shown else {}
        common = {*names} if show_all or not part.__module__.startswith("rl.") else flag_words.COMMON
        group = parser.add_argument_group(title, _first_paragraph(part)) if common & {*names} else parser
        for name in names:
            hint, default = hints[name], defaults.get(name, fields[name].default)
            if default is dataclasses.MISSING and fields[name].default_factory is not dataclasses.MISSING:
                default = fields[name].default_factory()
            text = texts.get(name, "").replace("%", "%%") + _default_text(default)
            text = text if name in common else argparse.SUPPRESS
            required = default is dataclasses.MISSING
            group.add_argument(flag(name), dest=name, help=text, required=required, **_values(name, hint))
            if bool in _options(hint):
                group.add_argument(flag(f"no_{name}"), dest=name, action="store_false", help=argparse.SUPPRESS)
    return parser


def _groups(flags: type) -> list[tuple[str, type, list[str]]]:
    """The title, the dataclass and the fields of each group, in the order of --help."""
    left = {field.name for field in dataclasses.fields(flags)}
    groups = []
    for part in flags.__mro__:
        names = [name for name in vars(part).get("__annotations__", {}) if name in left]
        left -= {*names}
        words = re.sub(r"\B([A-Z])", r"-\1", part.__name__.removesuffix("Args")).lower()
        title = "script" if part is flags or not words else words
        if names:
            groups.append((title, part, names))
    return sorted(groups, key=lambda group: FIRST.index(group[0]) if group[0] in FIRST else len(FIRST))


# ----------------------------------------------------------------------------------------------------- values and their types


def _values(name: str, hint: Any) -> dict:
    """What argparse has to know of a field's values."""
    options = _options(hint)
    several = next((option for option in options if get_origin(option) in (tuple, list)), None)
    marks = getattr(hint, "__metadata__", ())
    limits = [f" ({mark})" for mark in marks if isinstance(mark, Range)]
    kind = (_options(get_args(several)[0]) if several else options) or [str]
    known = {"type": functools.partial(_read, name, kind, marks), "metavar": _kind(kind) + "".join(limits)}
    if several:
        return known | {"nargs": "*"}
    return known | ({"nargs": "?", "const": True} if bool in options else {})


def _options(hint: Any) -> list:
    """The types of which the annotation allows any, text last because it takes every word."""
    if get_origin(hint) is Annotated:
        return _options(get_args(hint)[0])
    if get_origin(hint) not in (Union, UnionType):
        return [hint]
    return sorted((option for part in get_args(hint) for option in _options(part)), key=lambda option: option is str)


def _read(name: str, options: list, marks: Sequence, text: str) -> Any:
    """A word of the command line as a value of one of the types."""
    for mark in marks:
        if isinstance(mark, Unavailable) and mark.word == text:
            raise UserError(f"{flag(name)} {text} {mark.reason}")
    for option in options:
        if option is NoneType and text.lower() == "none":
            return None
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if get_origin(option) is Literal and text in map(str, get_args(option)):
            return next(choice for choice in get_args(option) if str(choice) == text)
        if isinstance(option, type) and option not in (bool, NoneType):
            try:
                return option(text)
            except (ValueError, TypeError):
                continue
    raise argparse.ArgumentTypeError(f"expected {_kind(options)}, not {text!r}")


def _kind(options: list) -> str:
    """INT, or True|False, or the words to choose from."""
    names = []
    for option in options:
        if get_origin(option) is Literal:
            names += map(str, get_args(option))
        elif option is not NoneType:
            names += ["True", "False"] if option is bool else [option.__name__.upper()]
    return "|".join(names)


def _unknown(flags: type, words: list[str]) -> str:
    """The message for words that are no flags and no values."""
    known = [flag(field.name) for field in dataclasses.fields(flags)]
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    similar = dict.fromkeys(near for name in names for near in difflib.get_close_matches(name, known))
    hint = flag_words.hint(names) or (f" Similar: {', '.join(similar)}." if similar else "")
    return f"Unrecognized options: {', '.join(words)}.{hint} --help-all lists all flags."


# ------------------------------------------------------------------------------------------------------------- for --help


def _print_help(flags: type, description: str | None, defaults: dict, show_all: bool) -> NoReturn:
    """Print the flags on the first rank of the node, and end the process. show_all: not only the common ones."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        which = "" if show_all else "These are the common flags. All flags: --help-all. "
        text = f"{(description or '').strip()}\n\n{which}{BOOLEANS}".replace("%", "%%")
        _parser(flags, defaults, show_all, usage="%(prog)s [--FLAG VALUE ...]", description=text).print_help()
    sys.exit(0)


def _default_text(default: Any) -> str:
    """What a flag without a value means; nothing where the text says it."""
    if default is dataclasses.MISSING or default in (None, (), []):
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, (tuple, list)) else str(default)
    return f" (default: {shown.replace('%', '%%')})"


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

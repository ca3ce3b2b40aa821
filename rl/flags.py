"""The command line: tyro parses the flags, which have ranges and groups, and each error is a single message.

A flag is a field of a dataclass. Each component has its own dataclass, and a script's Args inherits them, or has them as parts
(rl/parts.py). A number's range is part of its type, and a method `check` of the dataclass refuses flags that contradict each
other (rl/ranges.py). A method `hint` may explain an unknown flag. All flags are checked before anything is loaded. A boolean
flag can be written --shuffle, --no-shuffle, --shuffle True or --shuffle=false.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from rl import parts
from rl.errors import UserError
from rl.ranges import check, flag, of_today
from rl.ranks import launch, process

Flags = TypeVar("Flags")

FROM_RUN = "--from-run"
OF_ONE_RUN = {"experiment_name", "resume_mode"}  # which another run does not take over
CONFIG = (tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff)


def parse(flags: type[Flags], description: str | None = None) -> Flags:
    """Parse the command line into an instance of the dataclass. If it is invalid, end the process with one message."""
    try:
        launch.check()
        words, defaults = _from_run(flags, sys.argv[1:])
        return read(flags, description, words, defaults)
    except UserError as error:
        process.fail(error)


def read(
    flags: type[Flags], description: str | None = None, args: Sequence[str] | None = None, defaults: dict | None = None
) -> Flags:
    """Parse a command line like `parse`, but raise UserError. args: the command line, by default this process's. defaults:
    values of flags that replace the class's defaults."""
    parts.check_class(flags)
    words = _spell_out_booleans(flags, _hyphenated(sys.argv[1:] if args is None else args))
    if {"-h", "--help", "--help-all"} & {*words}:
        from rl import flags_help  # late: a run needs none

        flags_help.show(flags, description or "", defaults or {}, show_all="--help-all" in words)
    found = _read(flags, words)
    given = names_in(flags, words)
    parsed = parts.make(flags, **(defaults or {}) | {name: parts.get(found, name) for name in given})
    check(parsed)
    return parsed


def _from_run(flags: type, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the command line without --from-run, and the flags of the run that it names. Raise UserError if there are none."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{FROM_RUN}=") else [word])]
    if FROM_RUN not in words:
        return words, {}
    at = words.index(FROM_RUN)
    file = Path(*words[at + 1 : at + 2], "config.json")
    try:
        recorded = of_today(json.loads(file.read_text())["flags"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{FROM_RUN}: {file} cannot be read ({error}). Give the directory of a run: runs/a.") from error
    known = {*parts.leaves(flags)} - OF_ONE_RUN
    foreign = [flag(name) for name in recorded if name not in {*parts.leaves(flags)}]
    warn([f"{', '.join(foreign)} of {file.parent}: this script has no such flags"] if foreign else [])
    defaults = {name: tuple(value) if isinstance(value, list) else value for name, value in recorded.items() if name in known}
    return [*words[:at], *words[at + 2 :]], defaults


def names_in(flags: type, words: Sequence[str]) -> set[str]:
    """Return the fields of the dataclass and its parts whose flags are on the command line."""
    fields = {*parts.leaves(flags)}
    names = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return fields & (names | {name.removeprefix("no_") for name in names})


def warn(lines: Iterable[str]) -> None:
    """Print the sentences as one warning line, on the job's first rank."""
    lines = list(lines)
    if lines and launch.here().rank == 0:
        print(f"warning: {'; '.join(lines)}.", file=sys.stderr, flush=True)


def _hyphenated(words: Sequence[str]) -> list[str]:
    """Return the command line with hyphens in the names of flags."""
    split = (word.partition("=") if word.startswith("--") else ("", "", word) for word in words)
    return ["".join([name.replace("_", "-"), equals, value]) for name, equals, value in split]


def _spell_out_booleans(flags: type, words: Sequence[str]) -> list[str]:
    """Return the command line with True or False after each boolean flag."""
    booleans = {flag(name) for name, leaf in parts.leaves(flags).items() if leaf.type in (bool, bool | None)}
    spelled: list[str] = []
    for word, following in itertools.pairwise([*words, "--"]):
        name, _, value = word.partition("=")
        if spelled and spelled[-1] in booleans:  # the word is the flag's value
            word = word.capitalize()
        elif name in booleans and value:
            word = f"{name}={value.capitalize()}"
        elif word in booleans and following.startswith("-"):
            word = f"{word}=True"
        elif word not in booleans and word.replace("--no-", "--", 1) in booleans:
            word = f"{word.replace('--no-', '--', 1)}=False"
        spelled.append(word)
    return spelled


def _read(flags: type[Flags], words: Sequence[str]) -> Flags:
    output = io.StringIO()  # not a terminal, so tyro writes plain characters
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            found, unknown = tyro.cli(_flat(flags), args=words, config=CONFIG, add_help=False, return_unknown_args=True)
    except SystemExit:
        raise UserError(f"the flags cannot be read. --help-all lists all flags.\n{output.getvalue().rstrip()}") from None
    found = parts.make(flags, **vars(found))
    if not unknown:
        return found
    known = [*map(flag, parts.leaves(flags))]
    names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    similar = dict.fromkeys(near for name in names for near in difflib.get_close_matches(name, known))
    own = "".join(part.hint(unknown) for part in parts.tree(found) if hasattr(part, "hint"))
    hint = own or (f" Similar: {', '.join(similar)}." if similar else "")
    raise UserError(f"Unrecognized options: {', '.join(unknown)}.{hint} --help-all lists all flags.")


def _flat(flags: type) -> type:
    """Return a dataclass of all flags, those of parts included."""
    fields: list[tuple] = []
    for name, leaf in parts.leaves(flags).items():
        default = {} if leaf.default is dataclasses.MISSING else {"default_factory": lambda leaf=leaf: leaf.default}
        fields.append((name, leaf.type, dataclasses.field(**default, kw_only=True)))
    return dataclasses.make_dataclass(flags.__name__, fields)

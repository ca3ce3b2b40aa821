"""A row of the table of keys, and how a key finds its row."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from tools.from_verl.command import parse_value
from tools.from_verl.verl_run import V1, Run

TRANSLATED, NOT_NEEDED, NOT_HERE = "translated", "not needed", "not here"


@dataclass(frozen=True)
class Row:
    """Keys that belong together."""

    kind: Literal["translated", "not needed", "not here"]
    names: tuple[tuple[str, ...], ...]  # each key under its names, the first is the one used
    flags: str = ""  # what they become, as the document shows it
    note: str = ""  # what the words mean here, why they are not needed, or what is missing
    meaning: Callable[[Run], dict[str, object]] | None = None  # None: the value is taken over as it is
    defaults: dict[str, object] = field(default_factory=dict)  # verl's, by the first name
    switch: str = ""  # verl's key without which these have no effect


def _row(kind: str, keys: str, flags: str = "", note: str = "", meaning: Callable | None = None) -> Row:
    names = []
    defaults = {}
    for word in keys.split():
        name, equals, default = word.replace("A.", "actor_rollout_ref.").replace("V1.", V1).partition("=")
        names.append(tuple(name.split("|")))
        if equals:
            defaults[names[-1][0]] = parse_value(default)
    return Row(kind, tuple(names), flags, note, meaning, defaults)


def to(keys: str, flags: str, note: str = "", meaning: Callable | None = None) -> Row:
    return _row(TRANSLATED, keys, flags, note, meaning)


def unneeded(keys: str, because: str) -> Row:
    return _row(NOT_NEEDED, keys, note=because)


def missing(keys: str, what: str, switch: str = "") -> Row:
    """Make the row of a feature that is missing here. A default in `keys` is the value with which nothing is missing."""
    return replace(_row(NOT_HERE, keys, note=what), switch=switch)


def find(key: str, rows: Iterable[Row]) -> tuple[Row, str] | None:
    """Return the row of a key and the key's name in it: by exact name, or by the longest pattern that matches."""
    found = None
    for row in rows:
        for names in row.names:
            for name in names:
                if name == key:
                    return row, names[0]
                if "*" in name and fnmatchcase(key, name) and (found is None or len(name) > len(found[2])):
                    found = row, key, name
    return found and found[:2]


def neutral(row: Row, key: str, value: object) -> bool:
    """Return True if a key of a missing feature has the value of a run without the feature."""
    pattern = next((name for name in row.defaults if fnmatchcase(key, name)), None)
    if pattern is not None and value == row.defaults[pattern]:
        return True
    return value in (None, False, [], "", {}, "disabled", "disable") or (value in (0, -1) and pattern is None)

"""Verl's keys and what each is here: the rows of keys.yaml and sft_keys.yaml, and how a key finds its row.

A row has one or several keys, each with verl's default behind `=`. `new|old` are two names of one key, `*` stands for any rest,
`A.` for actor_rollout_ref. and `V1.` for trainer.v1. What they become is in `flags`, with a `note` for the document and, unless
the value is taken over as it is, our word for some of verl's (`words`; `otherwise` is said of any other), or the function
that gives the flags their values (`meaning`). Other rows say why nothing has to be set (`unneeded`) or what is missing here
(`missing`): a default is then the value with which nothing is missing. The keys of a row with a `switch`, a key or key=word of
verl's, have no effect unless that is on: `idle` says so. Defaults are those of verl's main_ppo; defaults.yaml has
what its others set otherwise.
"""

import importlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal

from tools.from_verl.command import parse_value
from tools.from_verl.verl_run import Run, data, in_full

TRANSLATED, NOT_NEEDED, NOT_HERE = "translated", "not needed", "not here"


@dataclass(frozen=True)
class Row:
    """Keys that belong together."""

    kind: Literal["translated", "not needed", "not here"]
    names: tuple[tuple[str, ...], ...]  # each key under its names, the first is the one used
    defaults: dict[str, object]  # verl's, by the first name
    flags: str  # what they become, as the document shows it
    note: str  # what the words mean here, why they are not needed, or what is missing
    meaning: Callable[[Run], dict[str, object]] | None
    switch: str  # without which the keys have no effect
    idle: str  # what is said of them then

    @classmethod
    def of(cls, row: dict[str, str]) -> "Row":
        names = []
        defaults = {}
        for word in row["keys"].split():
            name, equals, default = in_full(word).partition("=")
            names.append(tuple(name.split("|")))
            if equals:
                defaults[names[-1][0]] = parse_value(default)
        kind = TRANSLATED if "flags" in row else NOT_NEEDED if "unneeded" in row else NOT_HERE
        note = row.get("note") or row.get("unneeded") or row.get("missing", "")
        meaning = _function(row["meaning"]) if "meaning" in row else None
        if "words" in row:
            meaning = partial(_by_words, names[0][0], row["flags"], row["words"], row.get("otherwise", ""))
        return cls(
            kind,
            tuple(names),
            defaults,
            row.get("flags", ""),
            note,
            meaning,
            in_full(row.get("switch", "")),
            row.get("idle", ""),
        )

    def made(self, run: Run) -> dict[str, object]:
        """Return the flags that the keys become, with their values; None for one to leave out."""
        flags = self.flags.split(", ")
        if self.why_off(run):
            return {flags[0]: None}
        return self.meaning(run) if self.meaning else dict(zip(flags, (run[names[0]] for names in self.names), strict=False))

    def why_off(self, run: Run, key: str = "") -> str:
        """Return why the key has no effect in a run whose `switch` is off; empty if it has one."""
        switch, has_word, word = self.switch.partition("=")
        is_on = switch in ("", key) or (run[switch] == word if has_word else run[switch])
        return "" if is_on else self.idle or f"{switch} is off"


def _default(word: str) -> tuple[str, object]:
    name, _, value = in_full(word).partition("=")
    return name, parse_value(value)


def _function(name: str) -> Callable[[Run], dict[str, object]]:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"tools.from_verl.{module}"), function)


def _by_words(key: str, flag: str, words: dict[object, object], otherwise: str, run: Run) -> dict[str, object]:
    word = run[key]
    is_known = isinstance(word, Hashable) and word in words
    if otherwise and not is_known:
        run.lacks(key, otherwise)
        return {}
    return {flag: words[word] if is_known else word} if flag else {}


TABLE = {title: [Row.of(row) for row in rows] for title, rows in data("keys.yaml").items()}
ROWS = [row for rows in TABLE.values() for row in rows]
OTHER_DEFAULTS = {program: dict(map(_default, text.split())) for program, text in data("defaults.yaml").items()}

# ------------------------------------------------------------------------------------------------ supervised training

SFT_KEYS = data("sft_keys.yaml")
OWN = [Row.of(row) for row in SFT_KEYS["rows"]]
_NAMED = {names[0] for row in OWN for names in row.names}
ROWS_OF_SFT = [*OWN, *(row for row in ROWS if not _NAMED & {names[0] for names in row.names})]


def name_by_reward(key: str, engine: object) -> str:
    """Return the name that a key of a supervised trainer has in training by reward. engine: the value of `engine`."""
    if key.startswith("engine."):  # a section of the engine's name, but for FSDP's
        section = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config"}.get(engine, engine)
        return f"actor_rollout_ref.actor.{section}.{key.removeprefix('engine.')}"
    heads = SFT_KEYS["heads"]
    head = next((head for head in heads if key.startswith(head)), "")
    return in_full(SFT_KEYS["names"].get(key) or heads.get(head, "") + key.removeprefix(head))


# ------------------------------------------------------------------------------------------------ rows of a key


def find(key: str, rows: Iterable[Row]) -> tuple[Row, str] | None:
    """Return the row of a key and the key's name in it: by exact name, or by the longest pattern that matches."""
    matches = [
        (name == key, len(name), row, names[0])
        for row in rows
        for names in row.names
        for name in names
        if name == key or ("*" in name and fnmatchcase(key, name))
    ]
    if not matches:
        return None
    is_exact, _, row, name = max(matches, key=lambda match: match[:2])
    return row, name if is_exact else key


def neutral(row: Row, key: str, value: object) -> bool:
    """Return True if a key of a missing feature has the value of a run without the feature."""
    pattern = next((name for name in row.defaults if fnmatchcase(key, name)), None)
    if pattern is not None and value == row.defaults[pattern]:
        return True
    return value in (None, False, [], "", {}, "disabled", "disable") or (value in (0, -1) and pattern is None)

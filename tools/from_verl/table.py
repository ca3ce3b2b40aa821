"""Verl's keys and what each is here: the rows of keys.yaml and sft_keys.yaml, and how a key finds its row.

A row has one or several keys, each with verl's default behind `=`. `new|old` are two names of one key, `*` stands for any rest,
`A.` for actor_rollout_ref. and `V1.` for trainer.v1. What they become is in `flags`, with a `note` for the document and, unless
the value is taken over as it is, the function that gives the flags their values (`meaning`). Other rows say why nothing has to
be set (`unneeded`) or what is missing here (`missing`): a default is then the value with which nothing is missing, and `switch`
is verl's key without which the row's have no effect. Defaults are those of verl's main_ppo, those of its others in
OTHER_DEFAULTS.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import yaml

from tools.from_verl.command import parse_value
from tools.from_verl.verl_run import ASYNC, ONE_STEP_OFF, SYNC, V1, Run

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
    switch: str

    @classmethod
    def of(cls, row: dict[str, str]) -> "Row":
        names = []
        defaults = {}
        for word in row["keys"].split():
            name, equals, default = word.replace("A.", "actor_rollout_ref.").replace("V1.", V1).partition("=")
            names.append(tuple(name.split("|")))
            if equals:
                defaults[names[-1][0]] = parse_value(default)
        kind = TRANSLATED if "flags" in row else NOT_NEEDED if "unneeded" in row else NOT_HERE
        note = row.get("note") or row.get("unneeded") or row.get("missing", "")
        meaning = _function(row["meaning"]) if "meaning" in row else None
        return cls(kind, tuple(names), defaults, row.get("flags", ""), note, meaning, row.get("switch", ""))


def _function(name: str) -> Callable[[Run], dict[str, object]]:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"tools.from_verl.{module}"), function)


def data(name: str) -> dict | list:
    """Return what a YAML file of this folder has."""
    return yaml.safe_load((Path(__file__).parent / name).read_text())


TABLE = {title: [Row.of(row) for row in rows] for title, rows in data("keys.yaml").items()}
ROWS = [row for rows in TABLE.values() for row in rows]
# Of the supervised trainers, whose other keys are called as in training by reward (supervised.py)
OWN = [Row.of(row) for row in data("sft_keys.yaml")]
_NAMED = {names[0] for row in OWN for names in row.names}
ROWS_OF_SFT = [*OWN, *(row for row in ROWS if not _NAMED & {names[0] for names in row.names})]

# What verl's own configurations of its other two programs set otherwise.
_SPLIT = {"algorithm.rollout_correction.bypass_mode": True}
OTHER_DEFAULTS: dict[str, dict[str, object]] = {
    SYNC: {},
    ONE_STEP_OFF: _SPLIT,
    ASYNC: _SPLIT
    | {
        "actor_rollout_ref.actor.use_rollout_log_probs": True,
        "async_training.staleness_threshold": 0.1,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": True,
        "rollout.total_rollout_steps": 100,
    },
    V1: {  # separate_async of its newer trainer
        f"{V1}trainer_mode": "separate_async",
        f"{V1}sampler.max_off_policy_threshold": 8,
        "async_training.staleness_threshold": 1.0,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": True,
    },
}


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

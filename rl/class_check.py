"""What an Args class may not be: one whose flags or properties depend on the order of its bases, or hide one another.

Python lets the first base win and says nothing, so that a fork would train by another algorithm than it says. Allowed are flags
and properties of its own, and a flag's new default, `rollout_n: int = 4`. `check` and `hint` do not
collide: each class's own is called.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import ClassVar, get_origin

from rl import parts
from rl.errors import UserError

METHODS = ("check", "hint")  # those of each class are called
NO_FLAGS = {*METHODS, "_title", "_field", "_"}  # the title is for --help, `_: KW_ONLY` for @dataclass
OF_PYTHON = {"__post_init__", "__setattr__", "__getattribute__", "__getattr__"}  # of which only the first is called


def check_class(flags: type) -> None:
    """Raise UserError for a class whose bases, fields and properties collide with each other or with those of its parts."""
    _check_bases(flags, is_part=False)
    parts.leaves(flags)
    own = {name: part for part, name in _names(flags)}
    for path, part in _parts(flags):
        _check_bases(part, is_part=True)
        for owner, name in _names(part):
            if name in own and name not in path and not name.startswith("_"):  # --reward is args.reward.reward
                raise UserError(
                    f"{own[name].__name__} has `{name}`, but the run reads args.{path}.{name} of {owner.__name__}: rename the "
                    f"first, or write it into a class of your own, derived from {part.__name__}, as `{path}`."
                )


def _parts(flags: type) -> Iterator[tuple[str, type]]:
    """Return (path, class) of each part."""
    return iter({".".join(leaf.path): leaf.owner for leaf in parts.leaves(flags).values() if leaf.path}.items())


def _names(flags: type) -> Iterator[tuple[type, str]]:
    """Return (class, name) for all that the class and its bases define."""
    for part in flags.__mro__[:-1]:
        if part.__module__ in ("abc", "typing"):
            continue
        for name in {**inspect.get_annotations(part), **vars(part)}:
            is_own = not name.startswith(("__", "_abc_")) and name not in NO_FLAGS
            if is_own or name in OF_PYTHON:
                yield part, name


def _check_bases(flags: type, is_part: bool) -> None:
    """Raise UserError if the order of the bases decides, or if one definition hides another. A part may define a property or a
    method of its base in another way."""
    for part in flags.__mro__:
        _check_own(part)
        if "__dataclass_fields__" not in vars(part) and (fields := _untyped(part)):
            raise UserError(
                f"{part.__name__} has the field `{fields[0]}` and is no dataclass, so that it is no flag: write @dataclass "
                f"above class {part.__name__}."
            )
    owners: dict[str, list[type]] = {}
    for part, name in _names(flags):
        owners.setdefault(name, []).append(part)
    for name, (first, *others) in owners.items():
        for other in others:
            _check_pair(flags, name, first, other, is_part)


def _check_own(part: type) -> None:
    """Raise UserError if the class itself gives a name two meanings."""
    own = vars(part)
    fields = inspect.get_annotations(part)
    for name in fields:
        if isinstance(own.get(name), property | functools.cached_property):
            raise UserError(
                f"{part.__name__} has the field `{name}` and a property of that name, which hides what the flag is given: "
                "rename one of them."
            )
    for name in METHODS:
        if name in fields or (name in own and not callable(own[name])):
            raise UserError(f"{part.__name__} has a value `{name}`, but the run calls a method of that name: rename it.")


def _untyped(part: type) -> list[str]:
    """Return the fields of a class that is no dataclass."""
    return [name for name, hint in inspect.get_annotations(part).items() if not _is_constant(hint)]


def _is_constant(hint: object) -> bool:
    return ClassVar in (hint, get_origin(hint)) or (isinstance(hint, str) and "ClassVar" in hint)


def _kind(part: type, name: str) -> str:
    if name in (annotations := inspect.get_annotations(part)):
        return "constant" if _is_constant(annotations[name]) else "field"
    value = inspect.getattr_static(part, name)
    if isinstance(value, property | functools.cached_property):
        return "property"
    return "method" if callable(value) or isinstance(value, staticmethod | classmethod) else "value"


def _check_pair(flags: type, name: str, first: type, other: type, is_part: bool) -> None:
    """first, other: the classes that define `name`, in the order of the bases."""
    ours, its = _kind(first, name), _kind(other, name)
    both = f"{ours} {first.__name__}.{name}", f"{its} {other.__name__}.{name}"
    is_lost = ours == "field" and getattr(flags, "__dataclass_fields__", {}).get(name) is not first.__dataclass_fields__[name]
    if not issubclass(first, other) or is_lost:
        raise UserError(
            f"{flags.__name__} gets `{name}` from two bases, the {both[0]} and the {both[1]}, and their order would decide "
            f"which one holds. Rename one of them{f', or give the value in {flags.__name__} itself' if its == 'field' else ''}."
        )
    part = parts.hints(other).get(name) if (ours, its) == ("field", "field") else None
    if dataclasses.is_dataclass(part) and not dataclasses.is_dataclass(parts.hints(first)[name]):
        raise UserError(f"the {both[0]} hides the flags of {part.__name__}, which the run reads as args.{name}: rename it.")
    if (ours, its) == ("value", "field"):
        value = getattr(first, name)
        raise UserError(
            f"the {both[0]} = {value!r} has no type, so that the flag keeps its default: write "
            f"`{name}: {type(value).__name__} = {value!r}`."
        )
    allowed = {("field", "field"), ("constant", "field"), ("constant", "constant")}
    if is_part:
        allowed |= {("field", "constant")} | {pair for pair in itertools.product(("property", "method", "value"), repeat=2)}
    if (ours, its) not in allowed:
        remedy = (
            "and Python calls only the first: write both into one" if name in OF_PYTHON else "which the run reads: rename it"
        )
        raise UserError(f"the {both[0]} hides the {both[1]}, {remedy}.")

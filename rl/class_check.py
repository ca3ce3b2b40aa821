"""What an Args class may not be: one whose flags or properties depend on the order of its bases, or that loses a value.

Python lets the first base win and says nothing, so that a fork would train by another algorithm than it says.
"""

import inspect
from typing import ClassVar, get_origin

from rl import parts
from rl.errors import UserError

CALLED = ("check", "hint")  # methods of each class, which are all called


def check_class(flags: type) -> None:
    """Raise UserError for a class whose bases collide with each other, or whose values are no flags; also for its parts."""
    _check_values(flags)  # first: otherwise its parts cannot be told
    _check_bases(flags)
    for part in {leaf.owner for leaf in parts.leaves(flags).values()} - {flags}:
        _check_values(part)
        _check_bases(part)


def _check_values(flags: type) -> None:
    for base in flags.__mro__[:-1]:
        typed = [name for name, hint in inspect.get_annotations(base).items() if ClassVar not in (hint, get_origin(hint))]
        if typed and "__dataclass_fields__" not in vars(base):
            raise UserError(
                f"{base.__name__} has the field `{typed[0]}` and is no dataclass, so that it is no flag: write @dataclass "
                f"above class {base.__name__}."
            )
        fields = getattr(base, "__dataclass_fields__", {})
        for name in vars(base).keys() & fields.keys() - inspect.get_annotations(base).keys():
            value = vars(base)[name]
            raise UserError(
                f"{base.__name__}.{name} = {value!r} has no type, so that the flag keeps its default: write "
                f"`{name}: {type(value).__name__} = {value!r}`."
            )


def _check_bases(flags: type) -> None:
    owners: dict[str, type] = {}
    for base in flags.__mro__[:-1]:
        for name in {**inspect.get_annotations(base), **vars(base)}:
            if name.startswith("_") or name in CALLED:
                continue
            first = owners.setdefault(name, base)
            if not issubclass(first, base):
                raise UserError(
                    f"{flags.__name__} gets `{name}` from two bases, {first.__name__} and {base.__name__}, and their order "
                    "would decide which one holds. Rename one of them."
                )
    for name, field in flags.__dataclass_fields__.items():
        if owners[name].__dataclass_fields__[name] is not field:
            raise UserError(
                f"{flags.__name__} gets `{name}` from two bases, and the default of {owners[name].__name__} would be lost. "
                f"Give the value in {flags.__name__} itself."
            )

"""The flags of an Args class: its fields and those of its parts, all under flat names.

A part is a field whose value is a frozen dataclass, `schedule: AsyncSchedule = AsyncSchedule()`. Its fields are flags like all
others, --publish-every, and are recorded as such; code reads args.schedule.publish_every. A part may have parts.

A class is refused in which one name has two meanings, whose flags or properties depend on the order of its bases, or that loses
a value (`check_class`): Python lets the first base win and says nothing, so that a fork would train by another algorithm than
it says.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, ClassVar, TypeVar, get_origin, get_type_hints

from rl.errors import UserError

Args = TypeVar("Args")
CALLED = ("check", "hint")  # methods of each class, which are all called


class Part:
    """The base of dataclasses that are a field's value. To inherit one like a group of flags raises UserError."""

    _field = ""  # its usual name

    def check(self, args: Any) -> None:
        """Raise UserError for flags of this part that contradict each other, or those of other parts. args: the whole."""

    def __init_subclass__(cls):
        bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
        others = [base.__name__ for base in bases if not issubclass(base, Part)]
        if others:
            part = next(base for base in bases if issubclass(base, Part))
            name = part.__name__
            raise UserError(
                f"{cls.__name__} has {name} as a base next to {others[0]}, and their order would decide what holds. Write "
                f"`{part._field}: {name} = {name}()` into {cls.__name__} instead, as the scripts do."
            )


@dataclass(frozen=True)
class Leaf:
    """A field that is a flag."""

    path: tuple[str, ...]  # the fields that lead to its part, such as ("schedule", "split"); empty for a field of Args itself
    owner: type  # the dataclass that has the field
    default: Any  # dataclasses.MISSING without one
    type: Any
    marks: tuple  # of its type, such as a Range


@cache
def leaves(flags: type) -> dict[str, Leaf]:
    """Return the flags of a dataclass by name. Raise UserError if two parts have the same one, or a part is missing."""
    found: dict[str, Leaf] = {}
    for name, leaf in _walk(flags):
        if name in found:
            part = leaf if leaf.path else found[name]
            kind = part.owner.__name__
            flag = name.replace("_", "-")
            raise UserError(
                f"{flags.__name__}: {found[name].owner.__name__} and {leaf.owner.__name__} both define --{flag}. Rename one. "
                f"For another default, write `{part.path[-1]}: {kind} = {kind}({name}=...)`."
            )
        found[name] = leaf
    return found


def _walk(flags: type, path: tuple[str, ...] = (), instance: Any = None) -> Iterator[tuple[str, Leaf]]:
    plain = hints(flags)
    usual = None if instance is None else flags()
    for field in dataclasses.fields(flags):
        name = field.name
        if not field.init:  # it is computed, not given
            continue
        default = default_of(field)  # a part may have worked it out: "auto"
        if instance is not None and getattr(instance, name) != getattr(usual, name):
            default = getattr(instance, name)
        if dataclasses.is_dataclass(plain[name]):
            _check_part(flags, name, plain[name], default)
            yield from _walk(type(default), (*path, name), default)
        else:
            yield name, Leaf(path, flags, default, plain[name], _marks(flags, name, plain[name]))


def _marks(flags: type, name: str, kind: Any) -> tuple:
    """Return the marks of a field's type. A class that only gives another default keeps those of its base."""
    for base in flags.__mro__:
        if name in inspect.get_annotations(base) and (marks := getattr(hints(base, marked=True)[name], "__metadata__", ())):
            return marks if hints(base)[name] == kind else ()
    return ()


@cache
def hints(of: type, marked: bool = False) -> dict[str, Any]:
    """Return the types of a class's fields, with their marks or without. A class has many fields: they are read once."""
    return get_type_hints(of, include_extras=marked)


def _check_part(flags: type, name: str, kind: type, default: Any) -> None:
    """Raise UserError unless the part has a value of its kind."""
    if isinstance(default, kind):
        return
    first, *others = [part.__name__ for part in _concrete(kind)]
    found = f"has {type(default).__name__} as" if default is not dataclasses.MISSING else "lacks"
    instead = f", or with {' or '.join(others)}" if others else ""
    raise UserError(
        f"{flags.__name__} {found} `{name}`: write `{name}: {first} = {first}()` into it{instead}, as in the script that it "
        "was copied from."
    )


def _concrete(kind: type) -> list[type]:
    below = [part for child in kind.__subclasses__() for part in _concrete(child)]
    return below if inspect.isabstract(kind) else [kind, *below]


def default_of(field: dataclasses.Field) -> Any:
    """Return the field's default; dataclasses.MISSING without one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def get(args: Any, name: str) -> Any:
    """Return the value of a flag."""
    leaf = leaves(type(args)).get(name)
    return getattr(reduce(getattr, leaf.path, args) if leaf else args, name)


def flat(args: Any) -> dict[str, Any]:
    """Return all flags with their values."""
    return {name: get(args, name) for name in leaves(type(args))}


def make(flags: type[Args], /, **values) -> Args:
    """Return an instance with these values of flags, and defaults for the others."""
    defaults = {field.name: default_of(field) for field in dataclasses.fields(flags)}
    return flags(**_by_field(flags, values, defaults))


def replace(args: Args, /, **values) -> Args:
    """Return a copy with these values of flags."""
    return dataclasses.replace(args, **_by_field(type(args), values, vars(args)))


def _by_field(flags: type, values: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the values of flags as values of the dataclass's own fields, some of which are parts. now: their values before."""
    own: dict[str, Any] = {}
    of_parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        leaf = leaves(flags).get(name)
        if leaf and leaf.path:
            of_parts.setdefault(leaf.path[0], {})[name] = value
        else:
            own[name] = value
    return own | {part: replace(own.get(part, now[part]), **its) for part, its in of_parts.items()}


def tree(args: Any) -> Iterator[Any]:
    """Return the dataclass and all its parts."""
    yield args
    for field in dataclasses.fields(args):
        if dataclasses.is_dataclass(part := getattr(args, field.name)):
            yield from tree(part)


def check_class(flags: type) -> None:
    """Raise UserError for a class whose bases collide with each other, or whose values are no flags; also for its parts."""
    _check_values(flags)  # first: otherwise its parts cannot be told
    _check_bases(flags)
    for part in {leaf.owner for leaf in leaves(flags).values()} - {flags}:
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

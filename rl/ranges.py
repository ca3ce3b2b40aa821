"""Marks in the type of a flag's field, the check of all flags, and the flags that a run has recorded.

A mark says which numbers the flag accepts, what kind of thing it names, or that a run may resume with another value:

    lr: Annotated[float, Range(above=0)] = 1e-4
    teacher: Annotated[str | None, Content("model")] = None
    save_freq: MayChange[int] = 20
"""

import math
import os
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from rl import parts
from rl.errors import UserError

Mark, Value = TypeVar("Mark"), TypeVar("Value")
DEFAULT_BATCH = 8  # prompts per step if no flag says so
# torch's limits: 64 bits, float32
LARGEST_INT = 2**63 - 1
LARGEST_FLOAT = 3e38
LONGEST_NAME = 240  # bytes: file systems take 255, and a number may be appended
SWITCHES = {"use_kl_loss": "kl_loss_coef", "use_kl_in_reward": "kl_reward_coef"}  # of earlier versions -> what is 0 if off


@dataclass(frozen=True)
class Range:
    """The numbers that a flag accepts. No range includes NaN, infinity, or numbers too large for torch."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    also: float | str | None = None  # a value outside the bounds with a special meaning: -1 for "all", "auto"

    def __contains__(self, value: float) -> bool:
        if value == self.also:
            return True
        return (
            abs(value) <= _largest(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        names = ("above", "at_least", "below", "at_most")
        bounds = [f"{name.replace('_', ' ')} {bound:,}" for name in names if (bound := getattr(self, name)) is not None]
        words = " and ".join(bounds) or "finite"
        if self.at_least is not None and self.at_most is not None:
            words = f"from {self.at_least:,} to {self.at_most:,}"
        return words if self.also is None else f"{self.also}, or {words}"


@dataclass(frozen=True)
class Content:
    """A flag naming something whose content is part of the run: a model, or code (path/to/file.py:names or a command)."""

    kind: Literal["model", "code"]


@dataclass(frozen=True)
class _Changing:
    """A flag that may change when a run resumes, since it affects neither the loss nor the distribution of samples."""


MayChange = Annotated[Value, _Changing()]


def may_change(flags: type) -> set[str]:
    """Return the fields whose values may change when a run resumes."""
    return {*marks(flags, _Changing)}


def _largest(value: float) -> float:
    return LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT


def flag(name: str) -> str:
    """Return the flag of a field: "top_p" -> "--top-p"."""
    return "--" + name.replace("_", "-")


def of_today(recorded: dict) -> dict:
    """Return the flags that a run has recorded, perhaps of an earlier version, as today's."""
    off = {coef: 0.0 for switch, coef in SWITCHES.items() if recorded.get(switch) is False}
    return {name: value for name, value in recorded.items() if name not in SWITCHES} | off


def check(args) -> None:
    """Raise UserError for a text that is empty or spaces, a number out of its range, and contradicting flags. The latter are
    found by the method `check` that each dataclass of the arguments and of its parts may have."""
    for name, value in parts.flat(args).items():
        texts = value if isinstance(value, tuple | list) else [value]
        if any(isinstance(text, str) and not text.strip(" ") for text in texts):
            raise UserError(f"{flag(name)}: its value is empty. Give one, or leave the flag out.")
    for name, limits in marks(type(args), Range).items():
        value = parts.get(args, name)
        if value is None or value in limits:
            continue
        if limits.at_most is None and _largest(value) < value < math.inf:
            limits = f"at most {_largest(value)}"
        raise UserError(f"{flag(name)} must be {limits}; it is {value}.")
    for part in parts.tree(args):
        for base in reversed(type(part).__mro__):
            if "check" in vars(base):
                vars(base)["check"](*([part, args] if isinstance(part, parts.Part) else [part]))


def check_name(name: str, given: str, nested: bool = False) -> None:
    """Raise UserError unless the flag's value is a plain name. nested: whether it may have parts, such as group/run."""
    check_path(name, given)
    for part in given.split("/"):
        wrong = "is empty" if not part else f"is {part}" if part in (".", "..") else ""
        wrong = wrong or ("begins or ends with a space" if part != part.strip() else "")
        wrong = wrong or (f"is longer than {LONGEST_NAME} bytes" if len(part.encode()) > LONGEST_NAME else "")
        if wrong or (part != given and not nested):
            kind = "a plain name, or several joined by /, such as group/run" if nested else "a plain name, without /"
            raise UserError(f"{name} {given[:60]!a}: {f'a part {wrong}' if wrong else 'it has parts'}. Give {kind}.")


def check_path(name: str, given: str) -> None:
    """Raise UserError for a path that has characters that cannot be printed, or that no file system takes."""
    if wrong := next((character for character in given if not character.isprintable()), ""):
        raise UserError(f"{name} {given[:60]!a}: a name has no character such as {wrong!a}. Leave it out.")
    try:
        os.lstat(given)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(f"{name} {given[:60]!a} cannot be a directory ({error.strerror}).") from None


def marks(flags: type, kind: type[Mark]) -> dict[str, Mark]:
    """Return each field that has a mark of this kind, with the mark."""
    return {name: mark for name, leaf in parts.leaves(flags).items() for mark in leaf.marks if isinstance(mark, kind)}

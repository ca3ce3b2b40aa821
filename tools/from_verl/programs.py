"""verl's programs: our script for each that trains, and what to use here in place of the others."""

import re
from typing import NamedTuple

from rl.errors import UserError
from tools.from_verl.verl_run import data

PROGRAMS = data("programs.yaml")
TRAINERS = PROGRAMS["trainers"]


class Other(NamedTuple):
    """Programs that train nothing which a script here trains."""

    names: list[str]  # parts of a module's name
    what: str
    instead: str


OTHERS = [Other(**row) for row in PROGRAMS["others"]]
NAMES = re.compile("|".join(map(re.escape, [*TRAINERS, *(name for other in OTHERS for name in other.names)])))


def trainer(module: str) -> str | None:
    """Return our script for one of verl's trainers; None for another program."""
    if _other(module):
        return None
    return next((script for part, script in TRAINERS.items() if part in module), None)


def _other(module: str) -> Other | None:
    tail = ".".join(re.split(r"[./]", module.removesuffix(".py"))[-2:])  # directories further up may have any name
    return next((other for other in OTHERS if any(name in tail for name in other.names)), None)


def check(module: str) -> None:
    """Raise UserError unless the module, if there is one, is a trainer."""
    if not module or trainer(module):
        return
    if other := _other(module):
        raise UserError(f"{module} {other.what}, which no script here does. Instead: {other.instead}.")
    raise UserError(
        f"{module} is no trainer of verl's that is known here ({', '.join(TRAINERS)}), so nothing is translated. If it takes "
        "the keys of one of these, give its key=value words alone."
    )

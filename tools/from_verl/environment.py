"""The variables that a verl script exports, and what each of them means here."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from tools.from_verl.command import Command
from tools.from_verl.verl_run import data

SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD)(_|S?$)", re.IGNORECASE)
OF_A_KEY = re.compile(r".*env_vars\.(\w+)")  # ray_kwargs.ray_init.runtime_env.env_vars.NAME


class Variable(NamedTuple):
    names: str  # * stands for any rest
    verdict: str  # needed here too; not needed; harmful, unset it
    why: str
    harmless: Sequence[str] = ()  # values with which a harmful variable does nothing
    part: str = ""  # of the values that the row is about, in small letters


VARIABLES = [Variable(verdict=verdict, **row) for verdict, rows in data("variables.yaml").items() for row in rows]


def lines(command: Command) -> list[str]:
    """Return the section on the environment: a line for each variable that the script exports to verl, and for each file that
    was not read."""
    of_keys = {match[1]: value for key, value in command.values.items() if (match := OF_A_KEY.fullmatch(key))}
    of_keys |= {name: str(value).lower() for name, value in of_keys.items() if isinstance(value, bool)}
    given = command.environment | of_keys
    found = [f"{name}={_shown(name, str(value))}: {_word(name, str(value), command.text)}" for name, value in given.items()]
    of_cann = {True: ". CANN's are needed here too: source it before", False: ""}
    found += [f"{file}: not read; check its variables as well{of_cann[file.endswith('set_env.sh')]}" for file in command.unseen]
    return [f"# the environment ({len(found)})", *(f"#   {line}" for line in found)] if found else []


def _word(name: str, value: str, text: str) -> str:
    for variable in VARIABLES:
        named = any(fnmatchcase(name, pattern) for pattern in variable.names.split())
        if named and variable.part in value.lower():
            if value.lower() in variable.harmless:
                return "not needed: harmless with this value"
            return f"{variable.verdict}: {variable.why}"
    if re.search(rf"\$\{{?{name}\b", text):
        return "not needed: only the script itself reads it, and that has been evaluated"
    return "not known here: check what reads it"


def _shown(name: str, value: str) -> str:
    """Return the value; keys to accounts are not shown."""
    if name == "PATH" or (SECRET.search(name) and value):
        return "..."
    return value.replace("\n", "\\n")

"""Files of the user's code, which flags name as path/to/file.py:names."""

import hashlib
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import xxhash

from rl.errors import UserError

NAMED = re.compile(r"([\w-]+)=(.+)")  # an environment of some of the rows


def split_code(given: str) -> tuple[str, str]:
    """Return the path and the names of path/to/file.py:names. An adapter's name may have colons, as in a command."""
    path, found, names = given.partition(".py:")
    return path + found[:-1], names


def check_code(name: str, given: str, named: str) -> None:
    """Raise UserError unless the flag's value is path/to/file.py:names and the file exists. name: the flag; given: its value;
    named: what the names are, for the message."""
    path, names = split_code(given)
    if not names:
        raise UserError(f"{name} {given}: write it as path/to/file.py:{named}.")
    if not Path(path).is_file():
        raise UserError(f"{name} {given}: there is no file {path}.")


def import_file(path: str, name: str) -> ModuleType:
    """Import the user's file as a module of that name. It may import other files from its folder."""
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    module_spec.loader.exec_module(module)
    return module


def digest_code(spec: str | tuple[str, ...]) -> str:
    """Return a digest of the file in path/to/file.py:names, or of the files that a command names; without files, `spec`. Of
    several, name=path/to/file.py:names each, return all digests."""
    if not isinstance(spec, str):
        return " ".join(map(digest_code, spec))
    named = NAMED.fullmatch(spec)
    spec = named[2] if named else spec
    path = Path(spec.rpartition(":")[0])
    files = [path] if path.is_file() else [Path(word) for word in shlex.split(spec) if Path(word).is_file()]
    return " ".join(map(digest_file, files)) or spec


def digest_file(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, xxhash.xxh3_64).hexdigest()

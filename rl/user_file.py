"""Files of the user's code, which flags name as path/to/file.py:names."""

import importlib.util
import os
import sys
from types import ModuleType


def split_code(given: str) -> tuple[str, str]:
    """Return the path and the names of path/to/file.py:names. An adapter's name may have colons, as in a command."""
    path, found, names = given.partition(".py:")
    return path + found[:-1], names


def import_file(path: str, name: str) -> ModuleType:
    """Import the user's file as a module of that name. It may import other files from its folder."""
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    module_spec.loader.exec_module(module)
    return module

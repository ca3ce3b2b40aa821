"""--map file.py:function: the rows of the data as the user's function returns them, before their columns have a meaning.

It gets each row as a dict, with images as they are stored, on every rank; the rows that it returns are in the rank's memory.
`random` and NumPy's generator are seeded by the row's number, so that all ranks, and a resumed run, have the same rows.
"""

import functools
import math
import random
import sys
import traceback
from collections.abc import Callable

import numpy as np

from rl.data.files import table_of
from rl.data.tables import Rows
from rl.errors import UserError
from rl.ranks import watchdog
from user_processes.files import import_file, split_code


def mapped(table: Rows, file: str, spec: str, most: float = math.inf) -> Rows:
    """The first rows that the function returns, at most this many. table: that of the file. Raises UserError for a row that the
    function raises for, or returns something else for than a row or None, and if no row is left."""
    function = _function(spec)
    rows: list[dict] = []
    numbers: list[int] = []
    for number, row in enumerate(table):
        if len(rows) >= most:
            break
        where = f"{file} row {number}: --map {spec}"
        random.seed(number)
        np.random.seed(number)
        try:
            made = function(row)
        except (Exception, SystemExit) as error:
            raise UserError(f"{where} raised {_told(error)}. Correct it, or return None to leave the row out.") from error
        if made is not None and not (isinstance(made, dict) and all(isinstance(name, str) for name in made)):
            raise UserError(f"{where} returned {made!r:.60}. Return a row, as a dict with names of columns, or None.")
        if made is not None:
            rows.append(made)
            numbers.append(number)
        watchdog.progress()
    if not rows:
        raise UserError(f"{file}: --map {spec} leaves no row. Return rows, or leave the file out.")
    return table_of(file, rows, numbers)


@functools.cache
def _function(spec: str) -> Callable:
    path, name = split_code(spec)
    try:
        module = import_file(path, "user_map")
    except (Exception, SystemExit) as error:
        raise UserError(f"--map {spec}: {_told(error)}") from error
    sys.path.append(sys.path.pop(0))  # files next to the user's must not hide packages that are imported later
    if not callable(getattr(module, name, None)):
        raise UserError(f"--map {spec}: {path} has no function {name!r}.")
    return getattr(module, name)


def _told(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"

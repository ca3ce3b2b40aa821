"""The first line of a script's output, before its imports, which take seconds. Needs only Python's standard library."""

import contextlib
import gc
import os
import sys


def begin() -> None:
    """Print the run's first line on the job's first rank, unless --help is given, and pause the garbage collector on every rank
    until `process.run`: it would take a sixth of the time of the imports, whose objects stay. The line bypasses sys.stdout, so
    that nothing stays in a buffer if it cannot be written. A UserError of the script's classes is printed as a message."""
    gc.disable()
    sys.excepthook = _explain
    if os.environ.get("RANK", "0") == "0" and not {"-h", "--help", "--help-all"} & set(sys.argv):
        ranks = os.environ.get("WORLD_SIZE", "1")
        where = f" on {ranks} ranks" if ranks != "1" else ""
        with contextlib.suppress(OSError):
            os.write(1, os.fsencode(f"{os.path.basename(sys.argv[0])}{where}: importing torch and transformers\n"))


def _explain(kind: type, error: BaseException, trace) -> None:
    """Print an exception that the imports have raised."""
    from rl.errors import UserError
    from rl.ranks import process  # late: it imports torch

    if isinstance(error, UserError):
        process.fail(error)
    sys.__excepthook__(kind, error, trace)

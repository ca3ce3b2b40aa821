"""The first line of a run, before its imports, which take seconds: what was started, and that it lives. Needs nothing but
Python's library."""

import contextlib
import gc
import os
import sys


def say() -> None:
    """On the job's first rank, unless --help is all that is wanted. Past sys.stdout: where it cannot be written, nothing of it
    is left in a buffer. On every rank the garbage collector rests from here until the imports are done (rl/ranks/process.py):
    what they make stays, and looking through it again and again is a sixth of their time."""
    gc.disable()
    if os.environ.get("RANK", "0") == "0" and not {"-h", "--help", "--help-all"} & set(sys.argv):
        ranks = os.environ.get("WORLD_SIZE", "1")
        where = f" on {ranks} ranks" if ranks != "1" else ""
        with contextlib.suppress(OSError):
            os.write(1, os.fsencode(f"{os.path.basename(sys.argv[0])}{where}: importing torch and transformers\n"))

"""What a script does before its imports, which take seconds: it says what was started. Needs nothing but Python's library."""

import contextlib
import gc
import os
import sys


def begin() -> None:
    """Prints the run's first line on the job's first rank, unless --help is all that is wanted, and pauses the garbage
    collector on every rank until `process.run`: what the imports make stays, and looking through it is a sixth of their time.
    The line goes past sys.stdout: where it cannot be written, nothing of it is left in a buffer."""
    gc.disable()
    if os.environ.get("RANK", "0") == "0" and not {"-h", "--help", "--help-all"} & set(sys.argv):
        ranks = os.environ.get("WORLD_SIZE", "1")
        where = f" on {ranks} ranks" if ranks != "1" else ""
        with contextlib.suppress(OSError):
            os.write(1, os.fsencode(f"{os.path.basename(sys.argv[0])}{where}: importing torch and transformers\n"))

"""Hides the warnings that a library's native code writes to stderr while it starts.

Python's own lines (errors, the watchdog's report, a crash's stacks) still appear, and if the block fails, all hidden output is
printed. RL_ENGINE_LOG=1 hides nothing.
"""

import contextlib
import faulthandler
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TextIO

_kept_open: list[TextIO] = []


@contextlib.contextmanager
def native_stderr_kept_back() -> Iterator[None]:
    if os.environ.get("RL_ENGINE_LOG"):
        yield
        return
    console = os.fdopen(os.dup(2), "w", buffering=1)  # for Python's own lines; never closed: logging handlers may keep it
    _kept_open.append(console)
    before = sys.stderr
    crashes = faulthandler.is_enabled()
    before.flush()
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)  # child processes that start now keep it, such as multiprocessing's resource tracker
        sys.stderr = console
        if crashes:
            faulthandler.enable(console)
        try:
            yield
        except BaseException:
            kept.seek(0)
            console.write(kept.read().decode(errors="replace"))
            raise
        finally:
            before.flush()
            sys.stderr = before
            os.dup2(console.fileno(), 2)
            if crashes:
                faulthandler.enable()

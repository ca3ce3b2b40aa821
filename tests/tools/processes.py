"""Processes of this machine. Needs nothing but the standard library, for tests/programs/attacks.py."""

import contextlib
from pathlib import Path


def descendants(ancestor: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    of: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            parent = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
            of.setdefault(parent, []).append(int(file.parent.name))
    found = list(of.get(ancestor, ()))
    for pid in found:
        found += of.get(pid, ())
    return found

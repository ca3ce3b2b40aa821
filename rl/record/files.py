"""The files of a run's record. A full disk must not stop the run: data that cannot be written is kept for the next write."""

import sys
from collections import deque
from pathlib import Path

KEPT_BYTES = 64 << 20  # that may wait to be written; further records are dropped and counted


class Files:
    """Files in a run's directory. The disk may be full, or the directory lost or read-only, for a while: one warning says so,
    and another line follows when all is written."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._waiting: deque[tuple[str, bytes, str]] = deque()  # file, data to write, and mode to open it in
        self._dropped = 0
        self._failing = False

    def append(self, name: str, data: bytes) -> None:
        """Append the data to the file."""
        self._add(name, data, "ab")

    def replace(self, name: str, data: bytes) -> None:
        """Write the data as the whole file."""
        self._add(name, data, "wb")

    def close(self) -> None:
        """Try once more, and warn of records that could not be written."""
        self._write()
        missing = len(self._waiting) + self._dropped
        if self._failing:
            _warn(f"{missing:,} records of {self.directory} could not be written")

    def _add(self, name: str, data: bytes, mode: str) -> None:
        if sum(len(waiting) for _, waiting, _ in self._waiting) + len(data) > KEPT_BYTES:
            self._dropped += 1
        else:
            self._waiting.append((name, data, mode))
        self._write()

    def _write(self) -> None:
        while self._waiting:
            name, data, mode = self._waiting.popleft()
            left = memoryview(data)
            try:
                path = self.directory / name
                if path.parent != self.directory:  # a run's directory that was removed is not made again
                    path.parent.mkdir(exist_ok=True)
                with open(path, mode, buffering=0) as file:
                    while left:
                        left = left[file.write(left) :]
            except OSError as error:
                self._waiting.appendleft((name, bytes(left) if mode == "ab" else data, mode))
                if not self._failing:
                    _warn(
                        f"{self.directory / name} cannot be written ({error.strerror}). Training continues; the missing "
                        "records are written as soon as possible"
                    )
                self._failing = True
                return
        if self._failing:
            missing = f"{self._dropped:,} records are missing" if self._dropped else "nothing is missing"
            _warn(f"{self.directory} can be written again: {missing}")
        self._failing, self._dropped = False, 0


def _warn(text: str) -> None:
    print(f"warning: {text}.", file=sys.stderr, flush=True)

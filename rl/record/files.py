"""The files of a run's record. A full disk must not stop the run: data that cannot be written is kept for the next write."""

import sys
from collections import deque
from pathlib import Path


class Files:
    """Files in a run's directory. If the disk is lost for a while, one warning says so; a line follows when all is written."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._waiting: deque[tuple[str, bytes, str]] = deque()  # file, data to write, and mode to open it in
        self._failing = False

    def append(self, name: str, data: bytes) -> None:
        self._waiting.append((name, data, "ab"))
        self._write()

    def replace(self, name: str, data: bytes) -> None:
        self._waiting.append((name, data, "wb"))
        self._write()

    def close(self) -> None:
        """Try once more, and warn of records that could not be written."""
        self._write()
        if self._waiting:
            _warn(f"{len(self._waiting):,} records of {self.directory} could not be written")

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
            _warn(f"{self.directory} can be written again: nothing is missing")
        self._failing = False


def _warn(text: str) -> None:
    print(f"warning: {text}.", file=sys.stderr, flush=True)

"""A rank's standard output and error: a full disk behind them does not stop the rank, and each line of an error names the
rank."""

import io
import os
import sys


def outlive_output() -> None:
    """Let no printed text end the process from now on: text is lost while the disk of its file is full, and characters that
    stdout's encoding lacks are escaped, as on stderr. Messages of a user's reward function may contain anything."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name) or io.TextIOWrapper(io.FileIO(os.devnull, "w"))  # None if it has been closed
        old.flush()
        raw = _raw[name] = _Raw(old.fileno(), "w", closefd=False)
        how = {"encoding": old.encoding, "errors": "backslashreplace", "line_buffering": old.line_buffering}
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **how, write_through=old.write_through))


def sign_errors(name: str) -> None:
    """Let each line that Python (not native code) prints to stderr from now on begin with [name]."""
    if raw := _raw.get("stderr"):
        raw.sign = f"[{name}] ".encode()


class _Raw(io.FileIO):
    sign = b""
    in_line = False

    def write(self, data) -> int:
        try:
            return super().write(data) if not self.sign else self._write_signed(bytes(data))
        except BrokenPipeError:  # the reader has ended
            raise
        except OSError:
            return len(data)

    def _write_signed(self, data: bytes) -> int:
        if data:
            lines = (b"" if self.in_line else self.sign) + data[:-1].replace(b"\n", b"\n" + self.sign) + data[-1:]
            self.in_line = not data.endswith(b"\n")
            while lines:
                lines = lines[super().write(lines) :]
        return len(data)


_raw: dict[str, _Raw] = {}  # of stdout and stderr

"""Standard output and error of a rank: a full disk behind them stops nothing, and each line of an error bears the rank."""

import io
import os
import sys


def outlive_output() -> None:
    """From now on nothing that is printed ends the process: what goes into a file is lost while its disk is full, and a
    character that stdout's encoding lacks is escaped, as on stderr; a user's reward may have anything in its messages."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name) or io.TextIOWrapper(io.FileIO(os.devnull, "w"))  # None where it has been closed
        old.flush()
        raw = _raw[name] = _Raw(old.fileno(), "w", closefd=False)
        how = {"encoding": old.encoding, "errors": "backslashreplace", "line_buffering": old.line_buffering}
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **how, write_through=old.write_through))


def sign_errors(name: str) -> None:
    """From now on each line that Python prints to stderr begins with [name], for consoles of several nodes side by side. What
    native code prints there bypasses Python."""
    if raw := _raw.get("stderr"):
        raw.sign = f"[{name}] ".encode()


class _Raw(io.FileIO):
    sign = b""
    in_line = False

    def write(self, data) -> int:
        try:
            return super().write(data) if not self.sign else self._write_signed(bytes(data))
        except BrokenPipeError:  # nobody reads any more
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


_raw: dict[str, _Raw] = {}  # what stdout and stderr write through

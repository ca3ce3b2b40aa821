"""What a rank has found in its part of the prompts, and how the parts of a node's ranks are put together."""

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rl.errors import UserError


@dataclass
class Measured:
    kept: array = field(default_factory=lambda: array("q"))  # numbers of the rows that can be used
    truncated: int = 0  # rows of them whose prompts will be cut
    error: str | None = None  # about the first row that cannot be used; the ones after it are not measured
    lost: str | None = None  # about the first prompt, if the tokenizer does not keep its text

    def to_bytes(self) -> bytes:
        head = json.dumps([self.truncated, self.error, self.lost]).encode()
        return head + b"\n" + self.kept.tobytes()

    @staticmethod
    def of_bytes(data: bytes) -> "Measured":
        head, _, rows = data.partition(b"\n")
        return Measured(array("q", rows), *json.loads(head))

    @staticmethod
    def of_parts(parts: Iterable["Measured"]) -> "Measured":
        """Return the whole, as if one rank had measured all rows. Raise UserError for the first row that is an error there."""
        whole = Measured()
        for part in parts:
            if part.lost and not whole.kept:  # of a later prompt nobody asks it
                raise UserError(part.lost)
            if part.error:
                raise UserError(part.error)
            whole.kept.extend(part.kept)
            whole.truncated += part.truncated
        return whole


def up_to_error(items: Iterator) -> tuple[list, str | None]:
    """The items before the first UserError, and what that says."""
    found = []
    try:
        for item in items:
            found.append(item)
    except UserError as error:
        return found, str(error)
    return found, None

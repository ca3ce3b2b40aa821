"""The rows that can be used: each rank of a node measures a part of them, and all ranks get the whole."""

import json
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rl.errors import UserError
from rl.ranks.divided_work import DividedWork


@dataclass
class Measured:
    kept: array = field(default_factory=lambda: array("q"))  # numbers of the rows that can be used
    truncated: int = 0  # how many of these have prompts that will be cut
    error: str | None = None  # about this part's first row that cannot be used; the rows after it are not measured
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
            if part.lost and not whole.kept:  # only the first prompt of all counts
                raise UserError(part.lost)
            if part.error:
                raise UserError(part.error)
            whole.kept.extend(part.kept)
            whole.truncated += part.truncated
        return whole


def measure(measure_part: Callable[[DividedWork, Measured], None]) -> Measured:
    """Return the findings of all ranks of this node together. measure_part: adds those of this rank's part of the work. A row
    that cannot be used is an error here rather than in the middle of a run: it raises UserError, or notes `error`."""
    work, own = DividedWork(), Measured()
    try:
        measure_part(work, own)
    except UserError as error:  # of an earlier row than a noted one
        own.error = str(error)
    return Measured.of_parts(map(Measured.of_bytes, work.gather(own.to_bytes())))

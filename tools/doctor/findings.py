"""The result of a check: a line on the console, and an entry of doctor.json."""

from dataclasses import dataclass, field
from typing import Literal

OK, SLOW, WRONG, SKIPPED = "ok", "slow", "WRONG", "skipped"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `slow`: works, but costs time; `WRONG`: must be fixed; `skipped`: could not be tried here."""

    check: str
    status: Literal["ok", "slow", "WRONG", "skipped"]
    text: str
    remedy: str = ""
    facts: dict = field(default_factory=dict)  # numbers behind the text, for doctor.json

    def __str__(self) -> str:
        remedy = f" -> {self.remedy}" if self.remedy else ""
        return f"{self.status:7} {self.check}: {self.text}{remedy}"

"""The tape of what environments, tools, agents, judges and graders answered (--record-env), and answers from it.

    DIR/start.jsonl                  what the environments said at the start: their tools
    DIR/train/00000012.jsonl         a ticket's answers, one a line
    DIR/val_000020/00000003.jsonl    those to a prompt of the validation of this version of the weights

An answer is found by a digest of its question and of all that came before it in its response. So it serves the same words of
the model, the same row and the same files of the user's, or none. A newline precedes each line: a line that a kill has torn
is skipped. The last answer to a question counts. Only the rank that has the ticket writes to its file.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from rl.children.server import plain
from rl.errors import UserError
from rl.user_file import digest_code

Place = tuple[str, int]  # of a response's answers: a file in the directory, and its number
START: Place = ("start.jsonl", 0)


def digest(*what: Any) -> str:
    return hashlib.blake2b(json.dumps(what, default=plain).encode(), digest_size=16).hexdigest()


class Tape:
    """A tape, for one process."""

    def __init__(self, record_env: str | None, from_tape: str | None):
        self.is_all = bool(from_tape)  # whether nothing is called
        self.directory = Path(from_tape or record_env)

    def serve(self, pool, environments, engine) -> None:
        """Answer for graders, and say where episodes are recorded, in the process of a rank."""
        self._engine = engine
        self._graders = digest_code(pool.args.reward or "")
        pool.tape = self
        if environments:
            environments.place = self.place

    def place(self, id: tuple[Any, int]) -> Place:
        """Return where the answers of a response are. id: its key, of rl/generation/responses.py, and its number."""
        key, number = id
        kind = f"val_{self._engine.version:06d}" if key.validates else "train"
        return f"{kind}/{key.number:08d}.jsonl", number

    def read(self, place: Place) -> dict[str, dict]:
        """Return a response's answers by the digest of the question, without failures unless nothing is called."""
        file = self.directory / place[0]
        its = json.dumps({"response": place[1]})[:-1].encode()
        found = {}
        for line in file.read_bytes().split(b"\n") if file.exists() else ():
            if line.startswith(its + b","):
                with contextlib.suppress(ValueError):  # it is torn
                    entry = json.loads(line)
                    if self.is_all or "event" not in entry["answer"]:
                        found[entry["of"]] = entry["answer"]
        return found

    def write(self, place: Place, of: str, asked: str, answer: dict) -> None:
        """Record the answer to the question with this digest."""
        entry = {"response": place[1], "asked": asked, "of": of, "answer": answer}
        file = self.directory / place[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab") as lines:
            lines.write(b"\n" + json.dumps(entry).encode())

    def score(self, id: tuple[Any, int], item: dict) -> dict | None:
        """Return a grader's reply to this item; None if it has to be asked."""
        reply = self.read(self.place(id)).get(digest(self._graders, item))
        if not reply and self.is_all:
            raise UserError(self.missing(self.place(id), "the score of what the model said"))
        return reply

    def write_score(self, id: tuple[Any, int], item: dict, reply: dict) -> None:
        self.write(self.place(id), digest(self._graders, item), "score", reply)

    def missing(self, place: Place, what: str) -> str:
        return (
            f"--from-tape {self.directory}: {place[0]}, response {place[1]}: {what} is not on the tape. The recorded run had "
            "other weights, flags, data or files by then, or did not come this far. Give what it had, or --record-env to call "
            "what is missing."
        )

"""The tape of what environments, tools, agents, judges and graders answered (--record-env), and answers from it.

    DIR/start.jsonl                  what the environments said at the start: their tools
    DIR/train/00000012.jsonl         a ticket's answers, one a line
    DIR/val_000020/00000003.jsonl    those to a prompt of the validation of this version of the weights

An answer is found by a digest of its question and of all that came before it in its response. So it serves the same words of
the model, the same row and the same files of the user's, or none. A newline precedes each line: a line that a kill has torn
is skipped. The last answer to a question counts. Only the rank that has the ticket writes to its file.

An episode (TapedEpisode) has no process before its first question that is not on the tape. The process then continues after the
turns on it:

    functions                           as they are: a call needs none before it, unless the function has `keeps_state = True`
    a class with get_state, set_state   with what get_state returned after the last turn, as JSON holds it
    other classes, agents, and          by playing the turns again. If they answer otherwise, the response starts over, and is
    rewards in TRL's form               really played
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rl.errors import UserError
from user_processes.child import lost
from user_processes.files import digest_code
from user_processes.server import plain

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
        """Return where the answers of a response are. id: its key, of rl/generation/generator.py, and its number."""
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


ELSEWHERE = {"timeout", "model", "tape", "programs", "agent"}  # settings without influence, or whose code is read
COMPARED = ("prompt", "most", "history", "ids", "images", "reward", "done")  # in an answer
AGAIN = {"asked": "again"}  # the answer with which a response starts over


def opened(settings: dict, make_warm: Callable) -> Any:
    """Return what `make_warm` makes of the settings. If nothing is called, return what the tape has of it, without the user's
    code, or raise UserError."""
    tape = Tape(*settings["tape"])
    code = {name: [digest_code(code), code.partition(".py:")[2]] for name, (code, _) in settings["programs"].items()}
    further = {name: value for name, value in settings.items() if name not in ELSEWHERE}
    origin = digest(code, digest_code(settings["agent"] or ""), further)  # of all that decides about answers but questions
    ready = tape.read(START).get(origin)
    if not tape.is_all:
        warm = make_warm(settings)
        if not ready:
            tape.write(START, origin, "start", warm.ready)
    elif ready:
        warm = SimpleNamespace(settings=settings, programs=settings["programs"], turns_of=None, ready=ready)
    else:
        raise UserError(f"{tape.directory} (--from-tape) was recorded with other environments, tools or files. Give those.")
    warm.origin = origin
    warm.tape = tape
    warm.untaped = set()  # episodes that start over
    return warm


class TapedEpisode:
    """An episode with the same methods as those that its `begin` makes."""

    @classmethod
    async def begin(cls, *given: Any) -> "TapedEpisode":
        return cls(*given)

    def __init__(self, begin: Callable, warm: Any):
        self._begin, self._warm = begin, warm
        self._episode: Any = None
        self._chain = warm.origin  # a digest of all questions and answers so far
        self._past: list[tuple[dict, dict]] = []  # the questions, with their answers

    async def ask(self, item: dict) -> dict:
        warm = self._warm
        if item["do"] == "reset":
            self._place = tuple(item.pop("tape"))
            self._known = {} if self._place in warm.untaped else warm.tape.read(self._place)
            self._reset = item
            warm.untaped.discard(self._place)
        of = digest(self._chain, item)
        answer = None if self._episode else self._known.get(of)
        if answer is None and warm.tape.is_all:
            turn = f"the answer to turn {len(self._past)} of the model" if self._past else "the start of the episode"
            return {"failed": warm.tape.missing(self._place, turn)}
        if answer is None:
            try:
                answer = await self._really(item)
            except Exception as error:
                answer = lost(error)
            if answer is AGAIN:
                warm.untaped.add(self._place)
                return answer
            warm.tape.write(self._place, of, item["do"], answer)
        self._chain = digest(of, answer)
        self._past.append((item, answer))
        return answer

    async def _really(self, item: dict) -> dict:
        programs = self._warm.programs and self._warm.programs[self._reset["environment"]]
        if not self._episode:
            self._episode = await self._begin()
            if not await self._continues(bool(programs) and programs.restores and not self._warm.rewards):
                return AGAIN
        answer = await self._episode.ask(item)
        if programs and programs.has_state and "event" not in answer:
            answer |= await self._episode.ask({"do": "state"})
        return answer

    async def _continues(self, restores: bool) -> bool:
        """Bring the process to its state after the past. Return whether that is possible."""
        if restores and self._past:
            last = {"do": "restore", "after": len(self._past) - 1, "state": self._past[-1][1].get("state")}
            return "event" not in await self._episode.ask(self._reset | last)
        for question, recorded in self._past:
            answer = await self._episode.ask(question)
            if any(answer.get(name) != recorded.get(name) for name in COMPARED):
                return False
        return True

    def close(self) -> None:
        if self._episode:
            self._episode.close()

"""Episodes that answer from a tape as far as it goes, and record what they really answer (rl/rewards/tape.py). This runs in the
process of rl/environments/worker.py.

An episode has no process before its first question that is not on the tape. The process then continues after the turns on it:

    functions                           as they are: a call needs none before it, unless the function has `keeps_state = True`
    a class with get_state, set_state   with what get_state returned after the last turn, as JSON holds it
    other classes, agents, and          by playing the turns again. If they answer otherwise, the response starts over, and is
    rewards in TRL's form               really played
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rl.children.child import lost
from rl.errors import UserError
from rl.rewards.tape import START, Tape, digest
from rl.user_file import digest_code

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

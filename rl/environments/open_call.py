"""A call of an agent's that is being answered: its pieces, as they are sampled."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

from rl.environments.protocols.form import Answer, Call, Refused
from rl.environments.said import Growing, before, said
from rl.environments.turns import Turns


class OpenCall:
    """A call that is being answered."""

    def __init__(self, call: Call, index: int):
        self.call, self.index = call, index
        self.outcome: Answer | Refused | None = None
        self._has_news = asyncio.Event()

    def begin(self, turns: Turns, begun: Answer) -> None:
        """Begin to sample. begun: the answer before that."""
        self._begun = begun
        self._growing = Growing(turns, self.call.stop)

    def grow(self, ids: list[int]) -> None:
        """Add tokens that were sampled."""
        self._growing.ids += ids
        self._has_news.set()

    def answered(self, ids: list[int]) -> tuple[Answer, int, bool]:
        """Return the answer of a whole turn, its number of malformed calls, and whether it lacks its end token, because the
        call's limit cut it or a stop string ended it."""
        turns = self._growing.turns
        parts, malformed = said(turns, ids)
        parts["content"], _ = before(parts["content"], self.call.stop)
        _, stopped_by = before(turns.text(ids), self.call.stop)
        lacks_end = ids[-1] not in turns.end_tokens
        is_cut = lacks_end and not stopped_by and len(ids) == self.call.most
        known = {"sampled": len(ids), "is_cut": is_cut, "stopped_by": stopped_by, "is_whole": True}
        return dataclasses.replace(self._begun, **self._growing.whole(parts), **known), malformed, lacks_end

    def end(self, outcome: Answer | Refused) -> None:
        self.outcome = self.outcome or outcome
        self._has_news.set()

    async def pieces(self) -> AsyncIterator[tuple[str, str, Answer]]:
        """Yield (kind, text, answer): its "reasoning" and "content" as they grow, and its "end" when it is whole. Raise
        Refused."""
        while not self.outcome:
            await self._has_news.wait()
            self._has_news.clear()
            for piece in [] if self.outcome else self._growing.more():
                yield *piece, self._begun
        answer = self.outcome
        if isinstance(answer, Refused):
            raise answer
        rest = self._growing.rest(vars(answer))
        for piece in rest if rest or answer.content or answer.calls else [("content", "")]:
            yield *piece, answer
        yield "end", "", answer

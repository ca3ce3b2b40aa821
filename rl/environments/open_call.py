"""A call of an agent's that is being answered: its pieces, as they are sampled."""

import asyncio
from collections.abc import AsyncIterator

from rl.environments.protocols.form import Answer, Call, Refused
from rl.environments.said import Growing


class OpenCall:
    """A call that is being answered."""

    def __init__(self, call: Call, index: int):
        self.call, self.index = call, index
        self.begun: Answer | None = None  # before anything is sampled
        self.growing: Growing | None = None  # if the call streams
        self.outcome: Answer | Refused | None = None
        self._has_news = asyncio.Event()

    def grow(self, ids: list[int]) -> None:
        """Add tokens that were sampled."""
        self.growing.ids += ids
        self._has_news.set()

    def end(self, outcome: Answer | Refused) -> None:
        self.outcome = self.outcome or outcome
        self._has_news.set()

    async def pieces(self) -> AsyncIterator[tuple[str, str, Answer]]:
        """Yield (kind, text, answer): its "reasoning" and "content" as they grow, if the call streams, and its "end" when it is
        whole. Raise Refused."""
        while not self.outcome:
            await self._has_news.wait()
            self._has_news.clear()
            for piece in [] if self.outcome else self.growing.more():
                yield *piece, self.begun
        answer = self.outcome
        if isinstance(answer, Refused):
            raise answer
        rest = self.growing.rest(vars(answer)) if self.growing else []
        for piece in rest if rest or answer.content or answer.calls else [("content", "")]:
            yield *piece, answer
        yield "end", "", answer

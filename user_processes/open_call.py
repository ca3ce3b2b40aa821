"""A call of an agent's that is being answered: the model's turn in the agent's form, with thought, text and calls separated,
whole or as far as it has been sampled."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

from user_processes.calls import END_OF_THINKING, LLAMA
from user_processes.protocols.form import Answer, Call, Refused
from user_processes.turns import Turns

LONGEST_TAG = 16  # characters


def said(turns: Turns, ids: list[int]) -> tuple[dict, int]:
    """Return a turn's content, reasoning and calls, and the number of malformed calls. If no call is well formed, all of them
    stay in the text."""
    message = turns.message(ids)
    calls = [call for call in message["calls"] if isinstance(call, dict)]
    parts = _parts(message["content"] if calls else turns.text(ids), turns)
    return parts | {"calls": calls}, len(message["calls"]) - len(calls)


def before(text: str, stop: tuple[str, ...]) -> tuple[str, str]:
    """Return the text before the first of these strings, and the string; all of the text, and nothing, if there is none."""
    at, string = min(((text.find(string), string) for string in stop if string in text), default=(len(text), ""))
    return text[:at].rstrip(), string


def _parts(text: str, turns: Turns) -> dict[str, str]:
    thought, closed, content = text.rpartition(END_OF_THINKING)
    if not closed and (turns.begins_thinking or "<think>" in text):
        thought = text
        content = ""
    return {"reasoning": thought.replace("<think>", "").strip(), "content": content.strip()}


class Growing:
    """The text of a turn that is being sampled. What may become a call, a tag, a stop string or another character is held
    back."""

    def __init__(self, turns: Turns, stop: tuple[str, ...]):
        self.turns = turns
        self._begins = {string[:end] for string in stop for end in range(1, len(string) + 1)}
        self._stop = stop
        self.ids: list[int] = []
        self.shown = {"reasoning": "", "content": ""}
        self._text = ""
        self._from = self._read = 0  # tokens before the last ones in `_text`, which new ones are decoded with; tokens in it

    def more(self) -> list[tuple[str, str]]:
        """Return what the parts have grown by."""
        known = self.turns.text(self.ids[self._from : self._read])
        text = self.turns.text(self.ids[self._from :])
        if not text.endswith("\ufffd"):
            self._text += text[len(known) :]
            self._from, self._read = self._read, len(self.ids)
        at = self._text.rfind("<", -LONGEST_TAG)
        parts = _parts(self._text if at < 0 or ">" in self._text[at:] else self._text[:at], self.turns)
        is_call = LLAMA.match(parts["content"]) or parts["content"].startswith("{")
        content = "" if is_call else before(parts["content"].partition("<tool_call>")[0].strip(), self._stop)[0]
        held = max((len(begin) for begin in self._begins if content.endswith(begin)), default=0)
        parts["content"] = content[: len(content) - held].rstrip()
        return self.rest(self.whole(parts))

    def whole(self, parts: dict) -> dict:
        """Return a turn's parts. A second end of a thought cannot take back what was shown."""
        has_grown = all(parts[kind].startswith(text) for kind, text in self.shown.items())
        is_other = self.shown["content"] and parts["reasoning"] != self.shown["reasoning"]
        return parts if has_grown and not is_other else parts | self.shown

    def rest(self, parts: dict) -> list[tuple[str, str]]:
        """Return what these parts have beyond what was shown, and count it as shown."""
        new = [(kind, parts[kind].removeprefix(text)) for kind, text in self.shown.items()]
        self.shown = {kind: parts[kind] for kind in self.shown}
        return [(kind, text) for kind, text in new if text]


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

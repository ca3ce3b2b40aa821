"""The model's turn in an agent's form, with thought, text and calls separated: whole, or as far as it has been sampled."""

from rl.environments.calls import END_OF_THINKING, LLAMA
from rl.environments.turns import Turns

LONGEST_TAG = 16  # characters


def said(turns: Turns, ids: list[int]) -> tuple[dict, int]:
    """Return a turn's content, reasoning and calls, and the number of malformed calls. If no call is well formed, all of them
    stay in the text."""
    message = turns.message(ids)
    calls = [call for call in message["calls"] if isinstance(call, dict)]
    parts = _parts(message["content"] if calls else turns.text(ids), turns)
    return parts | {"calls": calls}, len(message["calls"]) - len(calls)


def _parts(text: str, turns: Turns) -> dict[str, str]:
    thought, closed, content = text.rpartition(END_OF_THINKING)
    if not closed and (turns.begins_thinking or "<think>" in text):
        thought = text
        content = ""
    return {"content": content.strip(), "reasoning": thought.replace("<think>", "").strip()}


class Growing:
    """The text of a turn that is being sampled. What may become a call, a tag or another character is held back."""

    def __init__(self, turns: Turns):
        self.turns = turns
        self.shown = {"content": "", "reasoning": ""}
        self.ids: list[int] = []
        self._text = ""
        self._from = self._read = 0  # tokens before the ones that are decoded together with new ones; tokens in `_text`

    def show(self) -> dict[str, str]:
        """Return the content and the reasoning so far."""
        known = self.turns.text(self.ids[self._from : self._read])
        text = self.turns.text(self.ids[self._from :])
        if not text.endswith("\ufffd"):
            self._text += text[len(known) :]
            self._from, self._read = self._read, len(self.ids)
        at = self._text.rfind("<", -LONGEST_TAG)
        parts = _parts(self._text if at < 0 or ">" in self._text[at:] else self._text[:at], self.turns)
        content = "" if LLAMA.match(parts["content"]) or parts["content"][:1] == "{" else parts["content"]
        parts["content"] = content.partition("<tool_call>")[0].strip()
        if self._extends(parts):
            self.shown = parts
        return self.shown

    def whole(self, parts: dict) -> dict:
        """Return the turn that the agent has got. A second end of a thought cannot take back what it was shown."""
        return parts if self._extends(parts) else parts | self.shown

    def _extends(self, parts: dict) -> bool:
        grows = all(parts[kind].startswith(text) for kind, text in self.shown.items())
        return grows and (not self.shown["content"] or parts["reasoning"] == self.shown["reasoning"])

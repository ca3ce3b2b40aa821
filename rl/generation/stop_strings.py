"""Strings that end a response (--stop).

A response ends with the token that completes one of them. Its tokens stay as they were sampled: graders, environments and
agents get the string, and the rest of that token. Whether a response ends only depends on its tokens, so one that was put aside
within a string continues as if it had not been.
"""

import functools
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

PART = "\N{REPLACEMENT CHARACTER}"  # for the bytes of a character that is not whole


class StopStrings:
    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        self.strings = strings
        self._decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        self._twice = functools.cache(lambda token: self._decode([token, token]))  # some decoders strip a text's first space
        self._ends = {PART, *(string[-1] for string in strings)}
        self._most = 1 + max(len(string.encode()) for string in strings)  # tokens of a string, which have a byte or more each

    def may_complete(self, token: int) -> bool:
        """Return whether this token may be a string's last one. For most it is not, which saves the time to decode."""
        return not self._ends.isdisjoint(self._twice(token))

    def complete(self, tokens: Sequence[int], turn: int = 0) -> bool:
        """Return whether the last token completes a string of the turn that begins with token number `turn`."""
        if not self.may_complete(tokens[-1]):
            return False
        start = max(turn, len(tokens) - self._most)
        while start > turn and PART in self._twice(tokens[start]):  # cut there, some decoders lose the characters that follow
            start -= 1
        return self._has_string(tokens[start:]) and (start == turn or self._has_string(tokens[turn:]))

    def _has_string(self, tokens: Sequence[int]) -> bool:
        text = self._decode(tokens)
        return any(string in text for string in self.strings)

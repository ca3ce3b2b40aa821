"""An environment of TRL's kind, for tests that have TRL itself play it."""


class Words:
    """Collects words, and is worth the share of the row's that were found."""

    def reset(self, words=(), **row):
        self.wanted, self.found = set(words), set()
        return f" There are {len(words)}."

    def look(self, word: str, times: int = 1) -> str:
        """Looks for a word.

        Args:
            word: The word to look for.
            times: How often to say what was found.
        """
        self.found |= {word} & self.wanted
        return f"{word}: {'yes' if word in self.wanted else 'no'}\n" * times

    def count(self) -> str:
        """Counts the words that were found."""
        return f"{len(self.found)} found"

    def get_reward(self) -> float:
        return len(self.found) / max(1, len(self.wanted))

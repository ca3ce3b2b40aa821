"""An environment of TRL's kind and a reward function over it, for tests that have TRL itself play them."""


def measured(environments, prompts, completions, completion_ids, words, **kwargs):
    """A number of all that a reward function is given."""
    rewards = []
    for env, prompt, said, ids, row in zip(environments, prompts, completions, completion_ids, words, strict=True):
        calls = [call["function"] for message in said for call in message.get("tool_calls") or ()]
        answers = [message["content"] for message in said if message["role"] == "tool"]
        sizes = [len(env.found), len(prompt[-1]["content"]), len(said), len(ids), len(row), len(calls), len("".join(answers))]
        sizes += [sum(call["name"] == "look" and len(call["arguments"]["word"]) for call in calls)]
        rewards.append(float(sum(size * 0.37**place for place, size in enumerate(sizes))))
    return rewards


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

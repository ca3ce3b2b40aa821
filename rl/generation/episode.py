"""The state of one response of several turns, for rl/generation/episodes.py."""

from collections import deque
from dataclasses import dataclass, field

from rl.generation.engine import Output
from rl.rewards.pool import Score


@dataclass
class Episode:
    """A response under way."""

    output: Output | None = None  # the response so far; None while the engine has it, or before it begins
    prompt: list[int] | None = None  # of the recorded response, if the run has resumed
    in_engine: bool = False
    is_over: bool = False
    at: int = 0  # number of tokens of the ended turns and of the answers to them
    turns: int = 0
    rewards: list[list] = field(default_factory=list)  # [last token of the turn, reward] for each turn with a reward
    calls: int = 0
    malformed: int = 0
    seconds: float = 0.0  # time that its environment took
    cached: int = 0  # tokens that the engine did not compute again for a further turn
    cut: str = ""  # why it ended early: "turns" or "length"
    event: Score | None = None  # why it cannot be scored
    again: deque[int] = field(default_factory=deque)  # lengths of the recorded runs that are still to be replayed
    restarts: int = 0
    most: int | None = None  # limit of the next turn's tokens, if an agent sets one

    def add(self, answer: dict) -> None:
        """Count an environment's answer to the turn that ends at `at`."""
        self.seconds += answer["seconds"]
        self.calls += answer.get("calls", 0)
        self.malformed += answer.get("malformed", 0)
        if answer["reward"] is not None:
            self.rewards.append([self.at - 1, answer["reward"]])

"""What is known of one episode, and of a prompt whose environments are being reset: episodes.py plays them."""

from collections import deque
from dataclasses import dataclass, field

from rl.generation.engine import Output
from rl.rewards.pool import Score


@dataclass
class Episode:
    """A response of several turns on its way."""

    output: Output | None = None  # so far; None while the engine has it, or before it begins
    in_engine: bool = False
    is_over: bool = False
    at: int = 0  # tokens of the turns that have ended, and of what answered them
    turns: int = 0
    rewards: list[list] = field(default_factory=list)  # [token, reward], of the last token of each turn that has one
    calls: int = 0
    malformed: int = 0
    seconds: float = 0.0  # that its environment took
    cached: int = 0  # tokens that the engine did not compute again for a further turn
    cut: str = ""  # what ended it early: "turns" or "length"
    event: Score | None = None  # why it cannot be scored
    again: deque[int] = field(default_factory=deque)  # lengths of the recorded runs that are to be played again
    restarts: int = 0
    most: int | None = None  # tokens of the next turn, of an agent that has a limit of its own

    def add(self, answer: dict) -> None:
        """What an environment's answer counts."""
        self.seconds += answer["seconds"]
        self.calls += answer.get("calls", 0)
        self.malformed += answer.get("malformed", 0)


@dataclass
class Beginning:
    """A prompt whose environments are being reset."""

    recorded: list[int] | None  # the prompt behind which its responses were sampled before
    n: int
    left: set[int]  # of the n, those that have not answered
    prompts: dict[int, list[int]] = field(default_factory=dict)  # of those that add to it

"""A response of several turns under way, and what an environment's answer adds to it."""

import time
from dataclasses import dataclass, field

import numpy as np

from rl.data.prompts import Prompt
from rl.generation.engine import Output
from rl.generation.responses import Key
from rl.model import sampling_mask
from rl.rewards.score import Score

Id = tuple[Key, int]  # of a response: its prompt's key, and its number
Named = tuple[list[int], str]  # the tokens of a prompt, and the digest of its images


@dataclass
class Episode:
    """A response under way."""

    output: Output | None = None  # the response so far; None while the engine has it, or before it begins
    prompt: Named | None = None  # of the recorded response, if the run has resumed
    in_engine: bool = False
    is_over: bool = False
    at: int = 0  # number of tokens of the ended turns and of the answers to them
    last: list[int] = field(default_factory=list)  # tokens of the last turn
    turns: int = 0
    rewards: list[float] = field(default_factory=list)  # of the turns that have one
    calls: int = 0
    malformed: int = 0
    began: float = 0.0  # when the engine got the turn under way
    seconds: list[list[float]] = field(default_factory=list)  # of each turn: until it was sampled, until it was answered
    cached: int = 0  # tokens that the engine did not compute again for a further turn
    cut: str = ""  # why it ended early: "turns" or "length"
    event: Score | None = None  # why it cannot be scored
    restarts: int = 0
    asked: float = 0.0  # when its environment was last asked
    most: int | None = None  # limit of the next turn's tokens, if an agent sets one
    schema: str = ""  # that the next turn keeps to, if an agent has one
    stop: tuple[str, ...] = ()  # strings that end the next turn, if an agent has some

    def say(self, end: int) -> list[int]:
        """Count the model's turn, which ends before token `end`. Return its tokens."""
        self.turns += 1
        self.seconds.append([time.monotonic() - self.began, 0.0])
        self.last = self.output.token_ids[self.at : end]
        self.at = end
        return self.last

    def add(self, answer: dict) -> None:
        """Count an environment's answer to the last turn."""
        self.seconds[-1][1] += answer["seconds"]
        self.calls += answer.get("calls", 0)
        self.malformed += answer.get("malformed", 0)
        if answer["reward"] is not None:
            self.rewards.append(answer["reward"])


def named_of(prompt: Prompt) -> Named:
    return prompt.ids, prompt.images.digest if prompt.images else ""


def with_answer(output: Output | None, ids: list[int]) -> Output | None:
    """Return an output with tokens of the environment: their log-prob is 0 and their version that of the token before."""
    if not ids:
        return output
    known = output.support
    if known is not None:
        known = np.concatenate([known, sampling_mask.nothing(len(ids), known.shape[1])])
    log_probs = [*output.log_probs, *[0.0] * len(ids)]
    versions = [*output.versions, *output.versions[-1:] * len(ids)]
    return Output(output.id, [*output.token_ids, *ids], log_probs, versions, "unfinished", output.routes, known)

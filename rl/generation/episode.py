"""A response of several turns under way, and what an environment's answer adds to it."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl.data.job import Job
from rl.data.prompts import Prompt
from rl.generation.engine import Output, Request
from rl.generation.generator import Added, Key
from rl.model import sampling_mask
from rl.rewards.score import Score

if TYPE_CHECKING:
    from rl.data.image_prompts import Images

Id = tuple[Key, int]  # of a response: its prompt's key, and its number
Named = tuple[list[int], str]  # the tokens of a prompt, and the digest of its images


@dataclass
class History:
    """A conversation: a prompt and the tokens behind it. Only an agent's response may have several."""

    request: Request  # with its prompt
    output: Output | None = None  # so far; None while the engine has it, or before it begins
    added: Added = field(default_factory=Added)  # with the images of its prompt, if it is a later one
    at: int = 0  # number of tokens of the ended turns and of the answers to them
    seconds: list[list[float]] = field(default_factory=list)  # of each turn: until it was sampled, until it was answered

    def sampled(self) -> np.ndarray:
        return self.added.sampled(len(self.output.token_ids))

    def end_of_run(self) -> int:
        """Return where the tokens end that begin at `at` and are all the policy's, or all the environment's."""
        _, run = next(itertools.groupby(self.sampled()[self.at :]))
        return self.at + len(list(run))


@dataclass
class Episode:
    """A response under way."""

    histories: list[History]
    prompt: Named | None = None  # of the recorded response, if the run has resumed
    known: int = 0  # tokens of the record, whose turns are played again
    shown: int = 0  # images of the record that the environment has shown again
    restarts: int = 0
    active: int = 0  # the number of the history whose turn it is
    first: int = 0  # the number of the history that an agent's first call began
    in_engine: bool = False
    final: Output | None = None  # all of it, when it is over
    last: list[int] = field(default_factory=list)  # tokens of the last turn
    turns: int = 0
    rewards: list[float] = field(default_factory=list)  # of the turns that have one
    calls: int = 0
    malformed: int = 0
    began: float = 0.0  # when the engine got the turn under way
    timed: list[float] = field(default_factory=list)  # the last of `seconds`
    cached: int = 0  # tokens that the engine did not compute again for a further turn
    cut: str = ""  # why it ended early: "turns" or "length"
    event: Score | None = None  # why it cannot be scored
    asked: float = 0.0  # when its environment was last asked
    wants: dict = field(default_factory=dict)  # an agent's "most" tokens of the next turn, "schema", "stop" strings, "stream"

    @property
    def now(self) -> History:
        return self.histories[self.active]

    def say(self, end: int) -> list[int]:
        """Count the model's turn, which ends before token `end`. Return its tokens."""
        now = self.now
        self.turns += 1
        self.timed = [time.monotonic() - self.began, 0.0]
        now.seconds.append(self.timed)
        self.last = now.output.token_ids[now.at : end]
        now.at = end
        return self.last

    def add(self, answer: dict) -> None:
        """Count an environment's answer to the last turn."""
        self.timed[1] += answer["seconds"]
        self.calls += answer.get("calls", 0)
        self.malformed += answer.get("malformed", 0)
        if answer["reward"] is not None:
            self.rewards.append(answer["reward"])

    def is_recorded(self, answer: dict, files: list[bytes]) -> bool:
        """Return whether an environment's answer, with these images, is the recorded one."""
        now = self.now
        images = now.added.images[self.shown : self.shown + len(files)]
        self.shown += len(files)
        return not answer["done"] and files == images and answer["ids"] == now.output.token_ids[now.at : now.end_of_run()]


def named_of(prompt: Prompt) -> Named:
    return prompt.ids, prompt.images.digest if prompt.images else ""


def images_of(job: Job, ids: list[int], shown: np.ndarray, files: Sequence[bytes]) -> "Images":
    """Return the images of these tokens. shown: [tokens] bool, those in which an image token is one of an image."""
    prep = job.prompts.prep
    places = np.flatnonzero((np.array(ids) == prep.image_token) & shown)
    return prep.over(ids[: places[-1] + 1], places, files)


def nothing(id: Id) -> Output:
    return Output(id, [], [], [], "unfinished")


def with_answer(output: Output, ids: list[int]) -> Output:
    """Return an output with tokens of the environment: their log-prob is 0 and their version that of the token before."""
    known = output.support
    if known is not None:
        known = np.concatenate([known, sampling_mask.nothing(len(ids), known.shape[1])])
    log_probs = [*output.log_probs, *[0.0] * len(ids)]
    versions = [*output.versions, *output.versions[-1:] * len(ids)]
    return Output(output.id, [*output.token_ids, *ids], log_probs, versions, "unfinished", output.routes, known)

"""Responses between a generator and its engine. Those here have one turn: the engine samples them from the prompt to the end.
rl/generation/episodes.py has responses of several turns, with the same methods.

    start      from the prompt, or from the tokens that a response had when the run was stopped
    pause      out of the engine: the step has enough of others (--over-sample)
    resume     back into the engine, from the last token

`unfinished` shows them at any time, for a checkpoint. New weights need no verb: responses continue under them.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rl.data.prompts import Prompt
from rl.generation.engine import Engine, Output, Request
from rl.ranks.timers import Timers
from rl.rewards.score import Score
from rl.samples.group import Group, Response


class Key(NamedTuple):
    """The name of an open group. Those of training come before those of validation."""

    validates: bool
    number: int  # the ticket, or the index among the validation prompts

    @property
    def place(self) -> int:
        """A number that no other key has, for random numbers and priorities."""
        return self.number + 2**62 * self.validates


@dataclass
class Added:
    """What an environment has added to a response."""

    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # of its first tokens; the policy samples the rest
    images: list[bytes] = field(default_factory=list)  # files
    histories: list[int] | None = None  # if there are several: number of tokens of each

    def sampled(self, tokens: int) -> np.ndarray:
        """Return which tokens the policy sampled, [tokens] bool."""
        return np.concatenate([self.mask, np.ones(tokens - len(self.mask), bool)])


@dataclass
class OpenGroup:
    """A prompt under way, with its n responses."""

    prompt: Prompt
    n: int
    greedy: bool = False  # whether there is a greedy response as well, number n (ReMax)
    outputs: dict[int, Output] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    added: dict[int, Added] = field(default_factory=lambda: defaultdict(Added))  # to each response
    brings_images: bool = False  # whether the environment has shown those of the prompt
    seconds: dict[int, list[list[float]]] = field(default_factory=dict)  # of an episode's turns, as Response has them
    requests: list[Request] = field(default_factory=list)  # one per response
    room: int = 0  # most tokens of a response
    event: Score | None = None  # why none of its responses can be sampled or scored

    def mask(self, number: int, tokens: int) -> np.ndarray | None:
        """Return which tokens of response `number` the policy sampled, [tokens] bool; None if all of them."""
        return self.added[number].sampled(tokens) if len(self.added[number].mask) else None

    @property
    def has_ended(self) -> bool:
        return len(self.outputs) == self.n + self.greedy

    @property
    def done(self) -> bool:
        return len(self.scores) == self.n + self.greedy

    def record(self, ticket: int, responses: list[Response], baseline: float = 0.0, routes: np.ndarray | None = None) -> Group:
        p = self.prompt
        images = p.images.digest if p.images else ""
        files = as_arrays(p.images.sources) if self.brings_images else None
        return Group(ticket, np.array(p.ids, np.int32), p.data_source, responses, baseline, images, routes, files)


def as_arrays(files: Iterable[bytes]) -> list[np.ndarray] | None:
    return [np.frombuffer(file, np.uint8) for file in files] or None


class Responses:
    """A generator's responses, of one turn each."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.working: dict[Key, OpenGroup] = {}
        self._paused: list[Output] = []

    @property
    def num_unfinished(self) -> int:
        return self.engine.num_unfinished

    def start(self, key: Key, group: OpenGroup, before: list[Output | None], prompt: tuple | None) -> list[Output]:
        """Start a group's responses, or continue recorded ones. before: each response so far; prompt: the recorded prompt's
        tokens, and the digest of its images. Return the responses that had already ended."""
        self.working[key] = group
        for request, output in zip(group.requests, before, strict=True):
            if output is None or output.finish_reason == "unfinished":
                self.engine.add(dataclasses.replace(request, so_far=output))
        return [output for output in before if output and output.finish_reason != "unfinished"]

    def decode(self, timer: Timers) -> list[Output] | None:
        """Step the engine once. Return the responses that end with it; None if there was nothing to sample."""
        if not self.engine.num_unfinished:
            return None
        with timer("gen"):
            return self.engine.step()

    def unfinished(self) -> list[Output]:
        return [*self.engine.unfinished(), *self._paused]

    def pause(self, below: Key) -> None:
        """Take all unfinished responses out of the engine. below: an upper bound of their keys, exclusive."""
        self._paused = sorted(self.engine.unfinished(), key=lambda output: output.id)
        self.engine.abort()

    def resume(self) -> None:
        for output in self._paused:
            key, number = output.id
            self.engine.add(dataclasses.replace(self.working[key].requests[number], so_far=output))
        self._paused = []

    def last_turn(self, output: Output) -> list[int]:
        """Return the tokens of an ended response that a verifier scores: those after the last masked one."""
        key, number = output.id
        masked = np.flatnonzero(~self.working[key].added[number].mask)
        return output.token_ids[1 + max(masked, default=-1) :]

    def score(self, id: tuple[Key, int]) -> Score | None:
        """Return an ended response's score; None if the scoring pool has to compute it."""

    def extra(self, id: tuple[Key, int]) -> dict[str, float]:
        return {}

    def drop(self, key: Key) -> None:
        """Forget a prompt whose responses were handed over."""
        del self.working[key]


def to_response(
    output: Output, group: OpenGroup, score: float | None = 0.0, extra: dict[str, float] | None = None, error: str | None = None
) -> Response:
    """Return the record of an engine's output. group: its own."""
    return Response(
        token_ids=np.array(output.token_ids, np.int32),
        log_probs=np.array(output.log_probs, np.float32),
        versions=np.array(output.versions, np.int32),
        finish_reason=output.finish_reason,
        score=score,
        extra=extra or {},
        error=error,
        mask=group.mask(output.id[1], len(output.token_ids)),
        routes=None if output.routes is None else output.routes[len(group.prompt.ids) :],
        support=output.support,
        histories=group.added[output.id[1]].histories,
        images=as_arrays(group.added[output.id[1]].images),
        seconds=group.seconds.get(output.id[1]),
    )


def recorded(id: tuple[Key, int], partial: Group | None, group: OpenGroup) -> Output | None:
    """Return response `id` as it was when the run stopped, and restore its mask and images in `group`; None if it had no
    token."""
    before = partial.responses[id[1]] if partial else None
    if before is None or not len(before.token_ids):
        return None
    if before.mask is not None:
        group.added[id[1]] = Added(before.mask, [file.tobytes() for file in before.images or ()])
    parts = (before.token_ids.tolist(), before.log_probs.tolist(), before.versions.tolist())
    routes = None if before.routes is None else np.concatenate([partial.prompt_routes, before.routes])
    return Output(id, *parts, before.finish_reason, routes, before.support)


def prompt_routes(outputs: Iterable[Output], group: OpenGroup) -> np.ndarray | None:
    """Return the routes of the prompt's tokens from a response that has them, if possible one that follows the prompt."""
    known = [output for output in outputs if output.routes is not None]
    known.sort(key=lambda output: (group.added[output.id[1]].histories or [1])[0] == 0)
    return known[0].routes[: len(group.prompt.ids)] if known else None

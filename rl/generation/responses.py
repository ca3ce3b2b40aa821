"""Responses on their way through an engine: those of one turn, which it samples from the prompt to their end.

rl/generation/episodes.py has responses of several turns, with the same methods.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rl.data.job import Job
from rl.data.prompts import Prompt
from rl.generation.engine import Engine, EngineArgs, Output, Request
from rl.generation.engine_ranks import EngineRanks
from rl.model.pretrained import end_token_ids
from rl.ranks.timers import Timers
from rl.rewards.pool import Score
from rl.samples.group import Group, Response

VALIDATION = 2**62  # added to a validation prompt's index where training has its ticket: the streams never meet


@dataclass
class Work:
    """A prompt on its way: what its n responses have become so far."""

    prompt: Prompt
    n: int
    greedy: bool = False  # whether number n is a greedy response next to them (ReMax)
    outputs: dict[int, Output] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    masks: dict[int, np.ndarray] = field(default_factory=dict)  # bool, of a response's first tokens; it samples those behind
    histories: dict[int, list[int]] = field(default_factory=dict)  # tokens of each, of a response that has several
    requests: list[Request] = field(default_factory=list)  # one a response

    def mask(self, number: int, tokens: int) -> np.ndarray | None:
        """[tokens] bool, what the policy sampled of response `number`; None: all of it."""
        known = self.masks.get(number)
        return None if known is None else np.concatenate([known, np.ones(tokens - len(known), bool)])

    def last_turn(self, number: int) -> int:
        """The first token of response `number` that only tokens of the policy follow."""
        known = self.masks.get(number)
        return 0 if known is None else 1 + max(np.flatnonzero(~known), default=-1)

    @property
    def has_ended(self) -> bool:
        return len(self.outputs) == self.n + self.greedy

    @property
    def done(self) -> bool:
        return len(self.scores) == self.n + self.greedy

    def group(self, ticket: int, responses: list[Response], baseline: float = 0.0, routes: np.ndarray | None = None) -> Group:
        p, images = self.prompt, self.prompt.images.digest if self.prompt.images else ""
        return Group(ticket, np.array(p.ids, np.int32), p.data_source, responses, baseline, images, routes)


class Responses:
    """What stands between a generator and its engine."""

    have_turns = False  # whether a text of them shows special tokens

    def __init__(self, engine: Engine):
        self.engine = engine
        self.working: dict[int, Work] = {}  # the generator's prompts under way, by key
        self._aside: list[Output] = []  # what was taken out of the engine unfinished

    @property
    def num_unfinished(self) -> int:
        """Responses that the engine has, or will be given."""
        return self.engine.num_unfinished

    def begin(self, key: int, work: Work, before: list[Output | None], prompt: list[int] | None) -> list[Output]:
        """Starts a prompt's responses, or lets those continue that were recorded. before: what each has become already; prompt:
        behind which it was sampled. Returns those that had ended."""
        self.working[key] = work
        for request, output in zip(work.requests, before, strict=True):
            if output is None or output.finish_reason == "unfinished":
                self.engine.add(dataclasses.replace(request, so_far=output))
        return [output for output in before if output and output.finish_reason != "unfinished"]

    def replay(self) -> None:
        """All that a stopped run had under way has begun."""

    def decode(self, timer: Timers) -> list[Output] | None:
        """One step of the engine. Returns the responses that end with it; None if there was nothing to sample."""
        if not self.engine.num_unfinished:
            return None
        with timer("gen"):
            return self.engine.step()

    def unfinished(self) -> list[Output]:
        """What those under way are so far."""
        return [*self.engine.unfinished(), *self._aside]

    def put_aside(self, below: int) -> None:
        """Takes out of the engine what has not ended, all with keys below this."""
        self._aside = sorted(self.engine.unfinished(), key=lambda output: output.id)
        self.engine.abort()

    def proceed(self) -> None:
        """Gives the engine what was put aside, as a run does that resumes from a checkpoint."""
        for output in self._aside:
            key, number = output.id
            self.engine.add(dataclasses.replace(self.working[key].requests[number], so_far=output))
        self._aside = []

    def last_turn(self, output: Output) -> list[int]:
        """What a verifier looks at, of a response that has ended."""
        key, number = output.id
        return output.token_ids[self.working[key].last_turn(number) :]

    def score(self, id: tuple[int, int]) -> Score | None:
        """Of a response that has ended; None where the scoring pool has to find it."""

    def extra(self, id: tuple[int, int]) -> dict[str, float]:
        """Further numbers of a response that has ended."""
        return {}

    def rewards(self, id: tuple[int, int]) -> list[list] | None:
        """[token, reward] of each turn that has a reward of its own."""

    def drop(self, key: int) -> None:
        """Forgets a prompt whose responses are handed over."""
        del self.working[key]

    def close(self) -> None:
        """The run has ended."""


def to_response(
    output: Output,
    work: Work,
    score: float | None = 0.0,
    extra: dict[str, float] | None = None,
    error: str | None = None,
    rewards: list | None = None,
) -> Response:
    """work: the prompt's, of which the output is a response."""
    return Response(
        token_ids=np.array(output.token_ids, np.int32),
        log_probs=np.array(output.log_probs, np.float32),
        versions=np.array(output.versions, np.int32),
        finish_reason=output.finish_reason,
        score=score,
        extra=extra or {},
        error=error,
        mask=work.mask(output.id[1], len(output.token_ids)),
        routes=None if output.routes is None else output.routes[len(work.prompt.ids) :],
        rewards=rewards or None,
        support=output.support,
        histories=work.histories.get(output.id[1]),
    )


def recorded(id: tuple[int, int], partial: Group | None, work: Work) -> Output | None:
    """What response `id` was when the run was stopped; None if it had no token."""
    before = partial.responses[id[1]] if partial else None
    if before is None or not len(before.token_ids):
        return None
    if before.mask is not None:
        work.masks[id[1]] = before.mask
    parts = (before.token_ids.tolist(), before.log_probs.tolist(), before.versions.tolist())
    routes = None if before.routes is None else np.concatenate([partial.prompt_routes, before.routes])
    return Output(id, *parts, before.finish_reason, routes, before.support)


def prompt_routes(outputs: Iterable[Output], work: Work) -> np.ndarray | None:
    """The routes of the prompt's tokens, from the first response that has them: from one that follows it, if there is one."""
    known = [output for output in outputs if output.routes is not None]
    known.sort(key=lambda output: work.histories.get(output.id[1], [1])[0] == 0)
    return known[0].routes[: len(work.prompt.ids)] if known else None


def make_responses(args: EngineArgs, job: Job, engine: Engine, engine_ranks: EngineRanks) -> Responses:
    """Of one turn or, with an environment, of several; what these need is imported for them alone."""
    if not args.has_environment:
        return Responses(engine)
    if args.has_agent:
        from rl.generation.agent_episodes import AgentEpisodes as Episodes
    else:
        from rl.generation.episodes import Episodes
    from rl.generation.shared_environments import SharedEnvironments

    ends = end_token_ids(job.path, job.tokenizer, args.trust_remote_code)
    if args.serve_policy and engine_ranks.is_leader:
        job.environments.serve(engine_ranks.index)
    environments = SharedEnvironments(job.environments, engine_ranks) if engine_ranks.size > 1 else job.environments
    return Episodes(environments, engine, args, job.tokenizer, ends)

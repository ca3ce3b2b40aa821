"""A generator takes tickets, steps the engine, lets the pool score ended responses and returns whole groups. It also validates.

Scoring overlaps with generation: a response goes to the scoring pool the moment it ends, while the rest of its group continues.

`Responses` stand between a generator and its engine. Those here have one turn: the engine samples them from the prompt to the
end. rl/generation/episodes.py has responses of several turns, with the same methods.

    start      from the prompt, or from the tokens that a response had when the run was stopped
    pause      out of the engine: the step has enough of others (--over-sample)
    resume     back into the engine, from the last token

`unfinished` shows them at any time, for a checkpoint. New weights need no verb: responses continue under them.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rl.data.job import Job
from rl.data.prompts import Prompt
from rl.generation.engine import Engine, EngineRanks, Output, Request, SamplingParams, request_seed
from rl.ranks import dist
from rl.ranks.timers import Timers
from rl.rewards.pool import ScoringPool
from rl.rewards.score import GREEDY, Score, overlong_penalty
from rl.samples.group import PENALTY, UNPENALISED, Group, Response

if TYPE_CHECKING:
    from rl.generation.val_sets import ValSet


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


class Generator:
    """Drives one engine. A ticket is a place in the endless prompt order."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        pool: ScoringPool,
        args,
        engine_ranks: EngineRanks,
        give_up: Callable[[], bool] = lambda: False,
        responses: Responses | None = None,
    ):
        """give_up: called between two engine steps of `generate`, which stops if it returns True; responses: by default of one
        turn."""
        self.engine, self.job, self.pool, self.args, self.engine_ranks = engine, job, pool, args, engine_ranks
        self.give_up = give_up if engine_ranks.size == 1 else lambda: False  # ranks that share an engine must stay together
        self.responses = responses or Responses(engine)
        self.working = self.responses.working
        self.left_out: list[Group] = []  # groups that the newest batch has not taken (--filter-groups)
        self._rows: list[dict] = []  # of the current validation
        self._ended: list[Output] = []  # responses that had ended when their prompt was started
        self.timer = Timers()  # gen, score and wait
        self.stop = None
        if args.sampling.stop:
            from rl.generation.stop_strings import StopStrings

            self.stop = StopStrings(args.sampling.stop, job.tokenizer)

    @property
    def free_slots(self) -> int:
        """The number of further tickets that keep the engine's slots filled."""
        return max(0, -(-(self.args.engine.max_num_seqs - self.responses.num_unfinished) // self.args.sampling.rollout_n))

    @property
    def is_validating(self) -> bool:
        return any(key.validates for key in self.working)

    @property
    def has_unfinished(self) -> bool:
        return not all(group.has_ended for group in self.working.values())

    @property
    def tickets(self) -> list[int]:
        """Tickets under way; none on ranks that do not hand over groups."""
        return [key.number for key in self.working if not key.validates and self.engine_ranks.is_leader]

    def gather_tickets(self) -> list[int]:
        """Return the tickets under way on all ranks. Collective."""
        return sorted(ticket for tickets in dist.all_gather_values(self.tickets) for ticket in tickets)

    def share(self, tickets: Sequence) -> Sequence:
        """Return this engine's share of tickets, or of a list in their order."""
        return tickets[self.engine_ranks.index :: self.engine_ranks.engines]

    def close(self) -> None:
        self.pool.close()
        if self.job.environments:
            self.job.environments.close()

    def start(self, ticket: int, recorded: Group | None = None) -> None:
        """Start the ticket's prompt, n times. recorded: its group as `unfinished` returned it before a stop."""
        _, index = self.job.order(ticket)
        group = OpenGroup(self.job.prompts[index], self.args.sampling.rollout_n, greedy=self.args.loss.needs_greedy)
        self._start(Key(False, ticket), group, self.args.sampling.training, recorded)

    def unfinished(self) -> list[Group]:
        """Return a group for every ticket under way, except validation, with its responses so far, all without scores."""
        outputs = {output.id: output for output in (*self._ended, *self.responses.unfinished())}
        groups = []
        for ticket in self.tickets:
            key = Key(False, ticket)
            group = self.working[key]
            so_far = [group.outputs.get(i) or outputs[key, i] for i in range(group.n + group.greedy)]
            responses = [to_response(output, group) for output in so_far]
            groups.append(group.record(ticket, responses, routes=prompt_routes(so_far, group)))
        return groups

    def decode(self) -> list[Output] | None:
        """Sample the next token of every response. Return the responses that ended; None if there was nothing to sample."""
        ended = self._ended
        self._ended = []
        return ended or self.responses.decode(self.timer)

    def score(self, ended: list[Output] | None, wait: float = 2e-3, idle: str = "wait") -> list[Group]:
        """Give the responses that `decode` returned to the scoring pool. Return the groups that are scored by now. If there was
        nothing to sample, wait up to `wait` seconds for a score, or sleep if none is due. idle: the timer of that sleep."""
        return self._take_done(self._take_scores(ended, wait, idle))

    def _take_scores(self, ended: list[Output] | None, wait: float, idle: str = "wait") -> list[Key]:
        """Submit the ended responses and collect scores. Return the keys that may be done."""
        if ended is not None:
            with self.timer("score"):
                for output in ended:
                    self._submit(output)
                scored = self.pool.wait()
        elif self.pool.pending:
            with self.timer("score"):
                scored = self.pool.wait(wait)
        else:
            scored = []
            with self.timer(idle):
                time.sleep(wait)
        for (key, number), score in scored:
            self.working[key].scores[number] = score
        if not self.engine_ranks.is_leader:
            return self._whole(ended or [])
        return list(dict.fromkeys(key for (key, _), _ in scored))

    def _whole(self, ended: list[Output]) -> list[Key]:
        """Return the keys whose last response is among these."""
        return [key for key in dict.fromkeys(output.id[0] for output in ended) if self.working[key].has_ended]

    def _take_done(self, keys: Iterable[Key]) -> list[Group]:
        """Return the groups of those keys that are done, and keep a validation's rows; only on the engine's first rank."""
        groups = []
        leads = self.engine_ranks.is_leader
        for key in keys:
            group = self.working[key]
            if not (group.done if leads else group.has_ended):
                continue
            if leads and key.validates:
                self._rows += [self._row(key.number, group, i) for i in range(group.n)]
            elif leads:
                groups.append(self._scored(key, group))
            self.responses.drop(key)
        return groups

    def generate(self, tickets: Sequence[int]) -> list[Group]:
        """Return as many scored groups as there are tickets, in ticket order; none if `give_up` says so. They are the first to
        end of these tickets and those paused before. The others pause, and resume in the next call."""
        self.responses.resume()
        for ticket in tickets:
            self.start(ticket)
        ended = sorted(key for key, group in self.working.items() if group.has_ended)
        while len(ended) < len(tickets) or self._ended or self.pool.pending:
            if self.give_up():
                return []
            outputs = self.decode() if len(ended) < len(tickets) or self._ended else None
            self._take_scores(outputs, wait=1.0)
            ended += sorted(self._whole(outputs or []))
        self.responses.pause(below=Key(True, 0))
        return self._take_done(sorted(ended[: len(tickets)]))

    def start_validation(self) -> None:
        """Start this engine's share of the validation prompts, each val_n times."""
        prompts = self.job.val_prompts
        for index in self.share(range(len(prompts))):
            _, sampling = self._val_set(index)
            self._start(Key(True, index), OpenGroup(prompts[index], sampling.val_n), sampling.validation)

    def _val_set(self, index: int) -> "ValSet":
        """Return the name and the sampling of a validation prompt's file."""
        sets = self.job.val_sets
        return sets.of(self.job.val_prompts, index) if sets else ("", self.args.sampling)

    def take_rows(self) -> list[dict]:
        """Return the validation's rows since the last call, one per response: index, data_source, environment (its name, or
        empty), prompt, response, ground_truth, score, acc, extra (the reward function's other numbers), pred (the answer that
        it found), error. With an error, score and acc are None."""
        rows = self._rows
        self._rows = []
        return rows

    def validate(self) -> list[dict]:
        """Validate with nothing else under way. Return all rows, in order, on every rank. Collective."""
        self.start_validation()
        while self.is_validating:
            self.score(self.decode(), wait=1.0)
        rows = dist.all_gather_values(self.take_rows())
        return sorted((row for part in rows for row in part), key=lambda row: row["index"])

    def _scored(self, key: Key, group: OpenGroup) -> Group:
        """Return the record of a group whose responses are scored."""
        reward = self.args.reward
        limit = self.args.sampling.max_response_length
        responses = []
        baseline = 0.0
        for i in range(group.n + group.greedy):
            output = group.outputs[i]
            score = group.scores[i]
            mask = group.mask(i, len(output.token_ids))
            length = len(output.token_ids) if mask is None else int(mask.sum())
            penalty = overlong_penalty(length, limit, reward.overlong_buffer_len, reward.overlong_penalty_factor)
            total = None if score.score is None else score.score + penalty
            extra = score.extra | self.responses.extra((key, i))
            if reward.overlong_buffer_len and score.score is not None:
                extra |= {UNPENALISED: score.score, PENALTY: penalty}
            responses.append(to_response(output, group, total, extra, score.error))
        if group.greedy:
            greedy = responses.pop()
            baseline = greedy.score or 0.0
            if greedy.score is None:  # without the baseline no response has an advantage
                responses = [dataclasses.replace(r, score=None, error=f"{GREEDY}{greedy.error}") for r in responses]
        return group.record(key.number, responses, baseline, prompt_routes(group.outputs.values(), group))

    def _row(self, index: int, group: OpenGroup, number: int) -> dict:
        score = group.scores[number]
        tokens = group.outputs[number].token_ids
        environments = self.job.environments
        if group.added[number].images:
            tokens = self.job.prompts.prep.once(tokens)
        return {
            "index": index,
            "data_source": self._val_set(index)[0] or group.prompt.data_source,
            "environment": environments.name_of(group.prompt.row) if environments else "",
            "prompt": group.prompt.text,
            "response": self.job.tokenizer.decode(tokens, skip_special_tokens=not environments),
            "ground_truth": str(group.prompt.ground_truth),
            "score": score.score,
            "acc": None if score.event else float(score.extra.get("acc", score.score)),
            "extra": {name: value for name, value in score.extra.items() if name != "acc"},
            "pred": score.pred,
            "error": score.error,
        }

    def _start(self, key: Key, group: OpenGroup, sampling: SamplingParams, before: Group | None = None) -> None:
        """Start the group's responses, or continue those of its record. If the prompt's images cannot be prepared, only this
        ticket is lost: its responses have no token and no score."""
        prompt = group.prompt
        group.room = sampling.max_tokens
        if self.stop:
            sampling = dataclasses.replace(sampling, stop=self.stop)
        if fault := prompt.images and prompt.images.fault():
            group.event = Score(None, event="image", message=f"{prompt.where}: {fault}")
            self.working[key] = group
            self._ended += [Output((key, i), [], [], [], "length") for i in range(group.n + group.greedy)]
            return
        for i in range(group.n):
            seed = request_seed(self.args.seed, key.place, i)
            group.requests.append(Request((key, i), prompt.ids, sampling, seed, images=prompt.images))
        if group.greedy:
            greedy = dataclasses.replace(sampling, temperature=0.0, support=0)
            group.requests.append(Request((key, group.n), prompt.ids, greedy, 0, images=prompt.images))
        so_far = [recorded(request.id, before, group) for request in group.requests]
        self._ended += self.responses.start(key, group, so_far, before and (before.prompt_ids.tolist(), before.images))

    def _submit(self, output: Output) -> None:
        key, number = output.id
        group = self.working[key]
        group.outputs[number] = output
        if output.routes is not None:
            from rl.model.router import check_record  # late: only a mixture's routes need it

            check_record(output.routes)
        if not self.engine_ranks.is_leader:  # the engine's first rank scores
            return
        p = group.prompt
        if score := group.event or self.responses.score(output.id):
            self.pool.hand_back(output.id, score)
            return
        text = self.job.tokenizer.decode(self.responses.last_turn(output), skip_special_tokens=True)
        further = {
            "prompt": p.row.get("prompt", p.text),
            "step": self.args.schedule.step_of(max(output.versions, default=0), self.job.total_steps),
            "split": "val" if key.validates else "train",
        }
        self.pool.submit(output.id, p.data_source, text, p.ground_truth, p.extra_info, **further)

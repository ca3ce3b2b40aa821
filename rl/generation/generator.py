"""The generator's turn: take tickets, step the engine, score what finished, hand over whole groups; validation too.

Scoring overlaps with generation: a response goes to the scoring pool the moment it ends, while its siblings continue.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl.data.images import ImageError
from rl.data.job import Job
from rl.data.prompts import Prompt
from rl.generation.choose_engine import make_engine
from rl.generation.engine import Engine, EngineArgs, Output, Request, SamplingParams, check_sampling, request_seed
from rl.generation.engine_ranks import EngineRanks
from rl.model.router import check_record
from rl.ranks import dist
from rl.ranks.timers import Timers
from rl.rewards.pool import Score, ScoringPool, can_score, overlong_penalty
from rl.samples.group import UNPENALISED, Group, Response
from rl.samples.ring_size import check_ring

if TYPE_CHECKING:
    from rl.generation.episodes import Episodes
    from rl.samples.prompt_history import PromptHistory

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

    def mask(self, number: int, tokens: int) -> np.ndarray | None:
        """[tokens] bool, what the policy sampled of response `number`; None: all of it."""
        known = self.masks.get(number)
        return None if known is None else np.concatenate([known, np.ones(tokens - len(known), bool)])

    @property
    def has_ended(self) -> bool:
        return len(self.outputs) == self.n + self.greedy

    @property
    def done(self) -> bool:
        return len(self.scores) == self.n + self.greedy

    def group(self, ticket: int, responses: list[Response], baseline: float = 0.0, routes: np.ndarray | None = None) -> Group:
        p, images = self.prompt, self.prompt.images.digest if self.prompt.images else ""
        return Group(ticket, np.array(p.ids, np.int32), p.data_source, responses, baseline, images, routes)


class Generator:
    """Drives one engine. A ticket is a place in the endless prompt order; a key is a ticket or VALIDATION + index."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        pool: ScoringPool,
        args: EngineArgs,
        engine_ranks: EngineRanks,
        give_up: Callable[[], bool] = lambda: False,
    ):
        """engine_ranks: those that share the engine; give_up: asked between two engine steps of `generate`."""
        self.engine, self.job, self.pool, self.args, self.engine_ranks = engine, job, pool, args, engine_ranks
        self.give_up = give_up if engine_ranks.size == 1 else lambda: False  # ranks that share an engine must stay together
        self.sampling = args.sampling
        check_sampling(engine, args.sampling)
        check_sampling(engine, args.val_sampling)
        self.working: dict[int, Work] = {}
        self._rows: list[dict] = []  # of the validation under way, if there is one
        self._unusable: list[int] = []  # prompts whose images cannot be prepared
        self._put_aside: list[Output] = []  # what the engine had under way when `generate` ended without it
        self.episodes: Episodes | None = None  # of several turns
        if args.has_environment:
            from rl.generation import episodes  # for them alone

            self.episodes = episodes.make(args, job, engine)
        self.history: PromptHistory | None = None  # of batches that are made whole
        if args.prompt_sampling != "uniform":
            from rl.samples import prompt_history  # for it alone

            self.history = prompt_history.PromptHistory(args, job.order)
        self.timer = Timers()  # gen, score and wait

    @property
    def free_slots(self) -> int:
        """The number of further tickets that keep the engine's slots filled."""
        taken = self.engine.num_unfinished + (self.episodes.coming if self.episodes else 0)
        return max(0, -(-(self.args.max_num_seqs - taken) // self.args.rollout_n))

    @property
    def is_validating(self) -> bool:
        return any(key >= VALIDATION for key in self.working)

    @property
    def has_unfinished(self) -> bool:
        return not all(work.has_ended for work in self.working.values())  # in the engine, or in its environment

    @property
    def tickets(self) -> list[int]:
        """Tickets under way, on the rank that hands them over."""
        return [key for key in self.working if key < VALIDATION and self.engine_ranks.is_leader]

    def start(self, ticket: int, partial: Group | None = None) -> None:
        """Gives the engine the ticket's prompt, n times. partial: what `unfinished` said of it when a run was stopped."""
        _, index = self.job.order(ticket)
        work = Work(self.job.prompts[index], self.args.rollout_n, greedy=self.args.needs_greedy)
        self._add(ticket, work, self.sampling, partial)

    def go_on(self, groups: list[Group]) -> None:
        """Starts this engine's share of what `unfinished` said on all ranks."""
        for group in groups[self.engine_ranks.index :: self.engine_ranks.engines]:
            self.start(group.ticket, group)
        if self.episodes:
            self.episodes.replay()

    def unfinished(self) -> list[Group]:
        """Every ticket under way, validation aside, with what its responses have become so far; nothing is scored in these."""
        outputs = {output.id: output for output in [*self.engine.unfinished(), *self._put_aside]}
        outputs |= self.episodes.outputs() if self.episodes else {}
        groups = []
        for ticket in self.tickets:
            work = self.working[ticket]
            so_far = [work.outputs.get(i) or outputs[ticket, i] for i in range(work.n + work.greedy)]
            responses = [_response(output, work) for output in so_far]
            groups.append(work.group(ticket, responses, routes=_prompt_routes(so_far, len(work.prompt.ids))))
        return groups

    def decode(self) -> list[Output] | None:
        """Samples the next token of every response under way: one step of the engine. Returns the responses that end with it;
        None if there was nothing to sample."""
        heard = None
        if self.episodes:
            with self.timer("env"):
                heard = self.episodes.hear()
        if self._unusable or not self.engine.num_unfinished or (self.episodes and self.episodes.blocked):
            return heard
        with self.timer("gen"):
            outputs = self.engine.step()
        return [*(heard or ()), *self.episodes.turns_ended(outputs)] if self.episodes else outputs

    def score(self, ended: list[Output] | None, wait: float = 2e-3, idle: str = "wait") -> list[Group]:
        """Gives the responses that `decode` returned to the scoring pool, and does not wait for it: returns the groups whose
        responses have all been scored by now. Where nothing was sampled it waits up to `wait` seconds for a score, and with
        nothing to score either sleeps as long. idle: the timer of that sleep."""
        return self._take_done(self._take_scores(ended, wait, idle))

    def _take_scores(self, ended: list[Output] | None, wait: float, idle: str = "wait") -> list[int]:
        """What `score` does until groups are taken. Returns the keys of which all may be done."""
        if self._unusable:
            keys, self._unusable = self._unusable, []
            return keys
        if ended is not None:
            with self.timer("score"):
                for output in ended:
                    self._submit(output)
                scored = self.pool.poll()
        elif self.pool.pending:
            with self.timer("score"):
                scored = self.pool.wait(wait)
        else:
            scored = []
            with self.timer(idle):
                time.sleep(wait)
        for (key, number), score in scored:
            self.working[key].scores[number] = score
        return list(dict.fromkeys(key for (key, _), _ in scored)) if self.engine_ranks.is_leader else self._whole(ended or [])

    def _whole(self, ended: list[Output]) -> list[int]:
        """The keys whose last response is among these."""
        return [key for key in dict.fromkeys(output.id[0] for output in ended) if self.working[key].has_ended]

    def _take_done(self, keys: Iterable[int]) -> list[Group]:
        """The groups of those that are done; a validation's rows are kept. The engine's first rank hands over, others only drop
        what has ended."""
        groups, leads = [], self.engine_ranks.is_leader
        for key in keys:
            work = self.working[key]
            if not (work.done if leads else work.has_ended):
                continue
            del self.working[key]
            if not leads:
                continue
            if key < VALIDATION:
                groups.append(self._group(key, work))
            else:
                self._rows += [self._row(key - VALIDATION, work, i) for i in range(work.n)]
            if self.episodes:
                self.episodes.drop(key)
        return groups

    def begin(self, tickets: Sequence[int]) -> None:
        """Starts this engine's share of tickets besides those that `generate` will be given."""
        for ticket in tickets[self.engine_ranks.index :: self.engine_ranks.engines]:
            self.start(ticket)

    def next_tickets(self, first: int, count: int) -> tuple[Sequence[int], int]:
        """`count` tickets from `first` on, without those that --prompt-sampling passes over, and the one behind the last."""
        return self.history.take(first, count) if self.history else (range(first, first + count), first + count)

    def remember(self, groups: Sequence[Group]) -> None:
        """Notes what all groups of a batch have shown of their prompts, for --prompt-sampling."""
        if self.history:
            self.history.note(groups)

    def generate(self, tickets: Sequence[int]) -> list[Group]:
        """As many finished, scored groups as there are tickets, in ticket order; none if it gives up. They are those that end
        first, of these tickets and those put aside before. The others are put aside: they continue with the next call from
        where they are."""
        if self.episodes:
            self.episodes.paused_below = 0
        for output in self._put_aside:  # given to the engine as by a run that resumes from a checkpoint
            key, number = output.id
            self.engine.add(dataclasses.replace(self._requests(key, self.working[key], self.sampling)[number], so_far=output))
        self._put_aside = []
        for ticket in tickets:
            self.start(ticket)
        self._unusable = []  # they are among those that have ended already
        ended = sorted(key for key, work in self.working.items() if work.has_ended)
        while len(ended) < len(tickets) or self.pool.pending:
            if self.give_up():
                return []
            outputs = self.decode() if len(ended) < len(tickets) else None
            self._take_scores(outputs, wait=1.0)
            ended += sorted(self._whole(outputs or []))
        self._put_aside = sorted(self.engine.unfinished(), key=lambda output: output.id)
        self.engine.abort()
        if self.episodes:
            self.episodes.paused_below = VALIDATION  # what those put aside are answered waits for the next call
        return self._take_done(sorted(ended[: len(tickets)]))

    def put_aside(self) -> list[int]:
        """The tickets that `generate` has put aside, on all ranks. A collective."""
        gathered = dist.all_gather_bytes(json.dumps(self.tickets).encode())
        return sorted(ticket for tickets in gathered for ticket in json.loads(tickets))

    def start_validation(self) -> None:
        """Gives the engine its share of the validation prompts, val_n times each."""
        a, ranks = self.args, self.engine_ranks
        for index in range(ranks.index, len(self.job.val_prompts), ranks.engines):
            self._add(VALIDATION + index, Work(self.job.val_prompts[index], a.val_n), a.val_sampling)

    def take_rows(self) -> list[dict]:
        """The validation's rows since the last call, one a response: index, data_source, prompt, response,
        ground_truth, score, acc, extra (the reward function's other numbers), error; without score and acc (None) where
        there is an error."""
        rows, self._rows = self._rows, []
        return rows

    def validate(self) -> list[dict]:
        """Validates with nothing else under way: all rows, in order, on every rank. A collective."""
        self.start_validation()
        while self.is_validating:
            self.score(self.decode(), wait=1.0)
        gathered = dist.all_gather_bytes(json.dumps(self.take_rows()).encode())
        return sorted((row for rows in gathered for row in json.loads(rows)), key=lambda row: row["index"])

    def _group(self, ticket: int, work: Work) -> Group:
        responses, baseline = [], 0.0
        for i in range(work.n + work.greedy):
            output, score = work.outputs[i], work.scores[i]
            mask = work.mask(i, len(output.token_ids))
            penalty = self._overlong(len(output.token_ids) if mask is None else int(mask.sum()))
            value = 0.0 if score.event and self.args.on_reward_error == "zero" and output.token_ids else score.score
            total = None if value is None else value + penalty
            extra = dict(score.extra) | (self.episodes.extra((ticket, i)) if self.episodes else {})
            if self.args.overlong_buffer_len and value is not None:
                extra |= {UNPENALISED: value, "overlong_penalty": penalty}
            rewards = self.episodes.rewards((ticket, i)) if self.episodes else None
            responses.append(_response(output, work, total, extra, score.error, rewards))
        if work.greedy:
            greedy = responses.pop()
            baseline = greedy.score or 0.0
            if greedy.score is None:  # without the baseline no response has an advantage
                responses = [
                    dataclasses.replace(r, score=None, error=f"the greedy response: {greedy.error}") for r in responses
                ]
        routes = _prompt_routes(work.outputs.values(), len(work.prompt.ids))
        return work.group(ticket, responses, baseline, routes)

    def _row(self, index: int, work: Work, number: int) -> dict:
        """A response of a validation, as `take_rows` describes it: all that the validation's metrics are computed from."""
        score = work.scores[number]
        return {
            "index": index,
            "data_source": work.prompt.data_source,
            "prompt": work.prompt.text,
            "response": self._text(work.outputs[number].token_ids, marked=bool(self.episodes)),
            "ground_truth": str(work.prompt.ground_truth),
            "score": score.score,
            "acc": None if score.event else float(score.extra.get("acc", score.score)),
            "extra": {name: value for name, value in score.extra.items() if name != "acc"},
            "error": score.error,
        }

    def _add(self, key: int, work: Work, sampling: SamplingParams, partial: Group | None = None) -> None:
        """Starts the prompt's responses, or lets them continue from what they are already. If its images cannot be prepared,
        which a header does not tell, they have no token and no score: such a prompt costs its ticket and nothing else."""
        images = work.prompt.images
        try:
            if images:
                images.prepare()
        except ImageError as error:
            self._give_up(key, work, f"{work.prompt.where}: {error}")
            return
        self.working[key] = work
        requests = self._requests(key, work, sampling)
        recorded = [_recorded(request.id, partial, work) for request in requests]
        if self.episodes:
            self.episodes.begin(key, work, requests, recorded, partial and partial.prompt_ids.tolist())
            return
        for request, output in zip(requests, recorded, strict=True):
            if output is None or output.finish_reason == "unfinished":
                self.engine.add(dataclasses.replace(request, so_far=output))
            else:
                self._submit(output)

    def _requests(self, key: int, work: Work, sampling: SamplingParams) -> list[Request]:
        """One a response."""
        ids, images = work.prompt.ids, work.prompt.images
        seeds = [request_seed(self.args.seed, key, i) for i in range(work.n)]
        requests = [Request((key, i), ids, sampling, seed, images=images) for i, seed in enumerate(seeds)]
        if work.greedy:
            requests.append(Request((key, work.n), ids, dataclasses.replace(sampling, temperature=0.0), 0, images=images))
        return requests

    def _give_up(self, key: int, work: Work, message: str) -> None:
        for number in range(work.n + work.greedy):
            work.outputs[number] = Output((key, number), [], [], [], "length")
            work.scores[number] = Score(None, event="image", message=message)
            self.pool.events["image"] += 1
        self.working[key] = work
        self._unusable.append(key)

    def _submit(self, output: Output) -> None:
        key, number = output.id
        work = self.working[key]
        work.outputs[number] = output
        if output.routes is not None:
            check_record(output.routes)
        if not self.engine_ranks.is_leader:  # the engine's first rank scores
            return
        p = work.prompt
        if self.episodes and (score := self.episodes.score(output.id, can_score(p.data_source, self.args))):
            self.pool.hand_back(output.id, score)
            return
        mask = work.mask(number, len(output.token_ids))
        last_turn = 0 if mask is None else 1 + max(np.flatnonzero(~mask), default=-1)
        self.pool.submit(output.id, p.data_source, self._text(output.token_ids[last_turn:]), p.ground_truth, p.extra_info)

    def _text(self, ids: list[int], marked: bool = False) -> str:  # marked: with special tokens, which show the turns
        return self.job.tokenizer.decode(ids, skip_special_tokens=not marked)

    def _overlong(self, length: int) -> float:
        a = self.args
        if not a.overlong_buffer_len:
            return 0.0
        return overlong_penalty(length, a.max_response_length, a.overlong_buffer_len, a.overlong_penalty_factor)


def _response(
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
    )


def _recorded(id: tuple[int, int], partial: Group | None, work: Work) -> Output | None:
    """What response `id` was when the run was stopped; None if it had no token."""
    before = partial.responses[id[1]] if partial else None
    if before is None or not len(before.token_ids):
        return None
    if before.mask is not None:
        work.masks[id[1]] = before.mask
    parts = (before.token_ids.tolist(), before.log_probs.tolist(), before.versions.tolist())
    routes = None if before.routes is None else np.concatenate([partial.prompt_routes, before.routes])
    return Output(id, *parts, before.finish_reason, routes)


def _prompt_routes(outputs: Iterable[Output], prompt: int) -> np.ndarray | None:
    """The routes of the prompt's tokens, from the first response that has them."""
    return next((output.routes[:prompt] for output in outputs if output.routes is not None), None)


def make_generator(
    args: EngineArgs, job: Job, ranks: dist.Ranks, pool: ScoringPool, give_up: Callable[[], bool] = lambda: False
) -> Generator:
    """This rank's generator, with the engine that the flags ask for."""
    check_ring(args, job.path)
    length = args.max_prompt_length + args.max_response_length
    engine = make_engine(job.path, args, length, args.dtype, ranks.device, args.trust_remote_code)
    dist.engines_first("generator")
    return Generator(engine, job, pool, args, EngineRanks(ranks, args.rollout_tp), give_up)

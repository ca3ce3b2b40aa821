"""A generator takes tickets, steps the engine, lets the pool score ended responses and returns whole groups. It also validates.

Scoring overlaps with generation: a response goes to the scoring pool the moment it ends, while the rest of its group continues.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence

from rl.data.job import Job
from rl.errors import ImageError
from rl.generation.choose_engine import make_engine
from rl.generation.engine import Engine, EngineArgs, Output, Request, SamplingParams, request_seed
from rl.generation.engine_ranks import EngineRanks
from rl.generation.responses import VALIDATION, Responses, Work, prompt_routes, recorded, to_response
from rl.model.pretrained import end_token_ids
from rl.model.router import check_record
from rl.ranks import dist
from rl.ranks.timers import Timers
from rl.rewards.pool import ScoringPool
from rl.rewards.score import GREEDY, Score, overlong_penalty
from rl.samples.group import PENALTY, UNPENALISED, Group
from rl.samples.ring_size import check_ring


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
        responses: Responses | None = None,
    ):
        """give_up: called between two engine steps of `generate`, which stops if it returns True; responses: by default of one
        turn."""
        self.engine, self.job, self.pool, self.args, self.engine_ranks = engine, job, pool, args, engine_ranks
        self.give_up = give_up if engine_ranks.size == 1 else lambda: False  # ranks that share an engine must stay together
        self.sampling = args.sampling
        self.responses = responses or Responses(engine)
        self.working = self.responses.working
        self._rows: list[dict] = []  # of the current validation
        self._ended: list[Output] = []  # responses that had ended when their prompt was started
        self.timer = Timers()  # gen, score and wait

    @property
    def free_slots(self) -> int:
        """The number of further tickets that keep the engine's slots filled."""
        return max(0, -(-(self.args.max_num_seqs - self.responses.num_unfinished) // self.args.rollout_n))

    @property
    def is_validating(self) -> bool:
        return any(key >= VALIDATION for key in self.working)

    @property
    def has_unfinished(self) -> bool:
        return not all(work.has_ended for work in self.working.values())

    @property
    def tickets(self) -> list[int]:
        """Tickets under way; none on ranks that do not hand over groups."""
        return [key for key in self.working if key < VALIDATION and self.engine_ranks.is_leader]

    def close(self) -> None:
        """End the scoring processes and the environments."""
        self.pool.close()
        self.responses.close()

    def start(self, ticket: int, partial: Group | None = None) -> None:
        """Give the engine the ticket's prompt, n times. partial: its group as `unfinished` returned it before a stop."""
        _, index = self.job.order(ticket)
        work = Work(self.job.prompts[index], self.args.rollout_n, greedy=self.args.needs_greedy)
        self._add(ticket, work, self.sampling, partial)

    def resume(self, groups: list[Group]) -> None:
        """Start this engine's share of the groups that `unfinished` returned on all ranks."""
        for group in groups[self.engine_ranks.index :: self.engine_ranks.engines]:
            self.start(group.ticket, group)
        self.responses.replay()

    def unfinished(self) -> list[Group]:
        """Return a group for every ticket under way, except validation, with its responses so far, all without scores."""
        outputs = {output.id: output for output in (*self._ended, *self.responses.unfinished())}
        groups = []
        for ticket in self.tickets:
            work = self.working[ticket]
            so_far = [work.outputs.get(i) or outputs[ticket, i] for i in range(work.n + work.greedy)]
            responses = [to_response(output, work) for output in so_far]
            groups.append(work.group(ticket, responses, routes=prompt_routes(so_far, work)))
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

    def _take_scores(self, ended: list[Output] | None, wait: float, idle: str = "wait") -> list[int]:
        """Submit the ended responses and collect scores. Return the keys that may be done."""
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
        if not self.engine_ranks.is_leader:
            return self._whole(ended or [])
        return list(dict.fromkeys(key for (key, _), _ in scored))

    def _whole(self, ended: list[Output]) -> list[int]:
        """Return the keys whose last response is among these."""
        return [key for key in dict.fromkeys(output.id[0] for output in ended) if self.working[key].has_ended]

    def _take_done(self, keys: Iterable[int]) -> list[Group]:
        """Return the groups of those keys that are done, and keep a validation's rows; only on the engine's first rank."""
        groups = []
        leads = self.engine_ranks.is_leader
        for key in keys:
            work = self.working[key]
            if not (work.done if leads else work.has_ended):
                continue
            if leads and key < VALIDATION:
                groups.append(self._group(key, work))
            elif leads:
                self._rows += [self._row(key - VALIDATION, work, i) for i in range(work.n)]
            self.responses.drop(key)
        return groups

    def begin(self, tickets: Sequence[int]) -> None:
        """Start this engine's share of the tickets."""
        for ticket in tickets[self.engine_ranks.index :: self.engine_ranks.engines]:
            self.start(ticket)

    def generate(self, tickets: Sequence[int]) -> list[Group]:
        """Return as many scored groups as there are tickets, in ticket order; none if `give_up` says so. They are the first to
        end of these tickets and those put aside before. The others are put aside and continue in the next call."""
        self.responses.proceed()
        for ticket in tickets:
            self.start(ticket)
        ended = sorted(key for key, work in self.working.items() if work.has_ended)
        while len(ended) < len(tickets) or self._ended or self.pool.pending:
            if self.give_up():
                return []
            outputs = self.decode() if len(ended) < len(tickets) or self._ended else None
            self._take_scores(outputs, wait=1.0)
            ended += sorted(self._whole(outputs or []))
        self.responses.put_aside(below=VALIDATION)
        return self._take_done(sorted(ended[: len(tickets)]))

    def put_aside(self) -> list[int]:
        """Return the tickets that `generate` has put aside, of all ranks. Collective."""
        gathered = dist.all_gather_bytes(json.dumps(self.tickets).encode())
        return sorted(ticket for tickets in gathered for ticket in json.loads(tickets))

    def start_validation(self) -> None:
        """Give the engine its share of the validation prompts, each val_n times."""
        a, ranks = self.args, self.engine_ranks
        for index in range(ranks.index, len(self.job.val_prompts), ranks.engines):
            self._add(VALIDATION + index, Work(self.job.val_prompts[index], a.val_n), a.val_sampling)

    def take_rows(self) -> list[dict]:
        """Return the validation's rows since the last call, one per response: index, data_source, prompt, response,
        ground_truth, score, acc, extra (the reward function's other numbers), error. With an error, score and acc are None."""
        rows = self._rows
        self._rows = []
        return rows

    def validate(self) -> list[dict]:
        """Validate with nothing else under way. Return all rows, in order, on every rank. Collective."""
        self.start_validation()
        while self.is_validating:
            self.score(self.decode(), wait=1.0)
        gathered = dist.all_gather_bytes(json.dumps(self.take_rows()).encode())
        return sorted((row for rows in gathered for row in json.loads(rows)), key=lambda row: row["index"])

    def _group(self, ticket: int, work: Work) -> Group:
        a = self.args
        responses = []
        baseline = 0.0
        for i in range(work.n + work.greedy):
            output = work.outputs[i]
            score = work.scores[i]
            mask = work.mask(i, len(output.token_ids))
            length = len(output.token_ids) if mask is None else int(mask.sum())
            penalty = overlong_penalty(length, a.max_response_length, a.overlong_buffer_len, a.overlong_penalty_factor)
            value = 0.0 if score.event and a.on_reward_error == "zero" and output.token_ids else score.score
            total = None if value is None else value + penalty
            extra = score.extra | self.responses.extra((ticket, i))
            if a.overlong_buffer_len and value is not None:
                extra |= {UNPENALISED: value, PENALTY: penalty}
            responses.append(to_response(output, work, total, extra, score.error, self.responses.rewards((ticket, i))))
        if work.greedy:
            greedy = responses.pop()
            baseline = greedy.score or 0.0
            if greedy.score is None:  # without the baseline no response has an advantage
                responses = [dataclasses.replace(r, score=None, error=f"{GREEDY}{greedy.error}") for r in responses]
        routes = prompt_routes(work.outputs.values(), work)
        return work.group(ticket, responses, baseline, routes)

    def _row(self, index: int, work: Work, number: int) -> dict:
        score = work.scores[number]
        return {
            "index": index,
            "data_source": work.prompt.data_source,
            "prompt": work.prompt.text,
            "response": self.job.tokenizer.decode(
                work.outputs[number].token_ids, skip_special_tokens=not self.responses.have_turns
            ),
            "ground_truth": str(work.prompt.ground_truth),
            "score": score.score,
            "acc": None if score.event else float(score.extra.get("acc", score.score)),
            "extra": {name: value for name, value in score.extra.items() if name != "acc"},
            "error": score.error,
        }

    def _add(self, key: int, work: Work, sampling: SamplingParams, partial: Group | None = None) -> None:
        """Start the prompt's responses, or continue recorded ones. If its images cannot be prepared, only this ticket is lost:
        its responses have no token and no score."""
        images = work.prompt.images
        try:
            if images:
                images.prepare()
        except ImageError as error:
            work.event = Score(None, event="image", message=f"{work.prompt.where}: {error}")
            self.working[key] = work
            self._ended += [Output((key, i), [], [], [], "length") for i in range(work.n + work.greedy)]
            return
        work.requests = self._requests(key, work, sampling)
        before = [recorded(request.id, partial, work) for request in work.requests]
        self._ended += self.responses.begin(key, work, before, partial and partial.prompt_ids.tolist())

    def _requests(self, key: int, work: Work, sampling: SamplingParams) -> list[Request]:
        ids, images = work.prompt.ids, work.prompt.images
        seeds = [request_seed(self.args.seed, key, i) for i in range(work.n)]
        requests = [Request((key, i), ids, sampling, seed, images=images) for i, seed in enumerate(seeds)]
        if work.greedy:
            greedy = dataclasses.replace(sampling, temperature=0.0, support=0)
            requests.append(Request((key, work.n), ids, greedy, 0, images=images))
        return requests

    def _submit(self, output: Output) -> None:
        key, number = output.id
        work = self.working[key]
        work.outputs[number] = output
        if output.routes is not None:
            check_record(output.routes)
        if not self.engine_ranks.is_leader:  # the engine's first rank scores
            return
        p = work.prompt
        if score := work.event or self.responses.score(output.id):
            self.pool.hand_back(output.id, score)
            return
        text = self.job.tokenizer.decode(self.responses.last_turn(output), skip_special_tokens=True)
        self.pool.submit(output.id, p.data_source, text, p.ground_truth, p.extra_info, p.row.get("prompt", p.text))


def make_generator(
    args: EngineArgs, job: Job, ranks: dist.Ranks, pool: ScoringPool, give_up: Callable[[], bool] = lambda: False
) -> Generator:
    """Return this rank's generator, with the engine that the flags ask for."""
    check_ring(args, job.path)
    if job.environments:
        job.environments.check()
    length = args.max_prompt_length + args.max_response_length
    adapters = args if args.publishes_adapters else None
    engine = make_engine(job.path, args, length, args.dtype, ranks.device, args.trust_remote_code, adapters)
    dist.engines_first("generator")
    engine_ranks = EngineRanks(ranks, args.rollout_tp)
    return Generator(engine, job, pool, args, engine_ranks, give_up, make_responses(args, job, engine, engine_ranks))


def make_responses(args: EngineArgs, job: Job, engine: Engine, engine_ranks: EngineRanks) -> Responses:
    """Return responses of one turn or, with an environment, of several turns, whose code is imported only then."""
    if not args.has_environment:
        return Responses(engine)
    if args.has_agent:
        from rl.generation.agent_episodes import AgentEpisodes as Episodes
    else:
        from rl.generation.episodes import Episodes

    ends = end_token_ids(job.path, job.tokenizer, args.trust_remote_code)
    if args.has_agent and engine_ranks.is_leader:
        job.environments.serve(engine_ranks.index)
    return Episodes(job, engine, engine_ranks, args, ends)

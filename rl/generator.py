"""The generator's turn: take tickets, step the engine, score what finished, hand over whole groups; validation too.

Scoring overlaps with generation: a response goes to the scoring pool the moment it ends, while its siblings go on.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl import dist
from rl.algorithm import AlgorithmArgs
from rl.batch import Group, Response, join_records, split_records
from rl.data import Prompt, PromptDataset, PromptOrder
from rl.engine import Engine, EngineArgs, Output, Request, SamplingParams, request_seed
from rl.scoring import EVENTS, RewardArgs, Score, ScoringPool, overlong_penalty
from rl.timers import Timers

VALIDATION = 2**62  # added to a validation prompt's index where training has its ticket: the streams never meet


@dataclass
class Work:
    """A prompt on its way: what its n responses have become so far."""

    prompt: Prompt
    n: int
    greedy: bool = False  # whether number n is a greedy response beside them (ReMax)
    outputs: dict[int, Output] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return len(self.scores) == self.n + self.greedy


class Generator:
    """Drives one engine. A ticket is a place in the endless prompt order; a key is a ticket or VALIDATION + index."""

    def __init__(
        self,
        engine: Engine,
        prompts: PromptDataset,
        order: PromptOrder,
        pool: ScoringPool,
        tokenizer: PreTrainedTokenizerBase,
        args: EngineArgs | RewardArgs | AlgorithmArgs,
        seed: int,
    ):
        self.engine, self.prompts, self.order, self.pool = engine, prompts, order, pool
        self.tokenizer, self.args, self.seed = tokenizer, args, seed
        self.sampling = SamplingParams(args.temperature, args.top_p, args.top_k, args.max_response_length, args.ignore_eos)
        self.working: dict[int, Work] = {}
        self.timer = Timers()  # gen, score and wait

    @property
    def room(self) -> int:
        """How many more tickets keep the engine's slots filled."""
        return max(0, -(-(self.args.max_num_seqs - self.engine.num_unfinished) // self.args.rollout_n))

    @property
    def is_validating(self) -> bool:
        return any(key >= VALIDATION for key in self.working)

    def start(self, ticket: int, so_far: Group | None = None) -> None:
        """Gives the engine the ticket's prompt, n times. so_far: what `unfinished` said of it when a run was stopped."""
        _, index = self.order(ticket)
        work = Work(self.prompts[index], self.args.rollout_n, greedy=self.args.needs_greedy)
        self._add(ticket, work, self.sampling, so_far.responses if so_far else ())

    def unfinished(self) -> list[Group]:
        """Every ticket under way, validation aside, with what its responses have become so far; nothing is scored in these."""
        outputs = {output.id: output for output in self.engine.unfinished()}
        groups = []
        for ticket, work in self.working.items():
            if ticket < VALIDATION:
                numbers = range(work.n + work.greedy)
                responses = [_response(work.outputs.get(i) or outputs[ticket, i]) for i in numbers]
                groups.append(Group(ticket, np.array(work.prompt.ids, np.int32), work.prompt.data_source, responses))
        return groups

    def poll(self, wait: float = 0.0) -> list[tuple[int, Work]]:
        """One engine step, then the prompts all of whose responses are finished and scored, by key. With nothing to step it
        sleeps up to `wait` seconds for a score, and with nothing to score either just so long."""
        if self.engine.num_unfinished:
            with self.timer("gen"):
                outputs = self.engine.step()
            with self.timer("score"):
                for output in outputs:
                    self._submit(output)
                scored = self.pool.poll()
        elif self.pool.pending:
            with self.timer("score"):
                scored = self.pool.wait(wait)
        else:
            with self.timer("wait"):
                time.sleep(wait)
            return []
        for (key, number), score in scored:
            self.working[key].scores[number] = score
        done = [key for key in dict.fromkeys(key for (key, _), _ in scored) if self.working[key].done]
        return [(key, self.working.pop(key)) for key in done]

    def generate(self, tickets: Iterable[int], give_up: Callable[[], bool] = lambda: False) -> list[Group]:
        """The finished, scored groups of the tickets, in ticket order; only those that are finished by then if it gives up."""
        for ticket in tickets:
            self.start(ticket)
        groups = []
        while self.working and not give_up():
            groups += [self.group(ticket, work) for ticket, work in self.poll(wait=1.0)]
        return sorted(groups, key=lambda g: g.ticket)

    def group(self, ticket: int, work: Work) -> Group:
        responses, baseline = [], 0.0
        for i in range(work.n + work.greedy):
            output, score = work.outputs[i], work.scores[i]
            penalty = self._overlong(len(output.token_ids))
            value = 0.0 if score.event and self.args.on_error == "zero" else score.score
            total = None if value is None else value + penalty
            extra = {**score.extra, **({"overlong_penalty": penalty} if self.args.overlong_buffer_len else {})}
            responses.append(_response(output, total, extra, score.error))
        if work.greedy:
            greedy = responses.pop()
            baseline = greedy.score or 0.0
            if greedy.score is None:  # without the baseline no response has an advantage
                responses = [
                    dataclasses.replace(r, score=None, error=f"the greedy response: {greedy.error}") for r in responses
                ]
        return Group(ticket, np.array(work.prompt.ids, np.int32), work.prompt.data_source, responses, baseline)

    def start_validation(self, prompts: PromptDataset, indices: Iterable[int]) -> None:
        """Gives the engine the validation prompts, val_n times each."""
        a = self.args
        sampling = SamplingParams(a.val_temperature, a.val_top_p, -1, a.max_response_length)
        for index in indices:
            self._add(VALIDATION + index, Work(prompts[index], a.val_n), sampling)

    def validate(self, prompts: PromptDataset, indices: Iterable[int]) -> list[dict]:
        """The rows of the given validation prompts, with nothing else under way."""
        self.start_validation(prompts, indices)
        rows = []
        while self.working:
            rows += [row for key, work in self.poll(wait=1.0) for row in self.rows(key, work)]
        return rows

    def rows(self, key: int, work: Work) -> list[dict]:
        """One row per response to a validation prompt: index, data_source, prompt, response, ground_truth, score, acc."""
        return [self._row(key - VALIDATION, work, i) for i in range(work.n)]

    def _row(self, index: int, work: Work, number: int) -> dict:
        score = work.scores[number]
        return {
            "index": index,
            "data_source": work.prompt.data_source,
            "prompt": work.prompt.text,
            "response": self._text(work.outputs[number]),
            "ground_truth": str(work.prompt.ground_truth),
            "score": score.score if score.event is None else 0.0,
            "acc": 0.0 if score.event else float(score.extra.get("acc", score.score)),
            "error": score.error,
        }

    def _add(self, key: int, work: Work, sampling: SamplingParams, so_far: Sequence[Response] = ()) -> None:
        """Starts the prompt's responses, or lets them go on from what they are `so_far`."""
        self.working[key], ids = work, work.prompt.ids
        requests = [Request((key, i), ids, sampling, request_seed(self.seed, key, i)) for i in range(work.n)]
        if work.greedy:
            requests.append(Request((key, work.n), ids, dataclasses.replace(sampling, temperature=0.0), 0))
        for request, before in zip_longest(requests, so_far):
            if before is None or not len(before.token_ids):
                self.engine.add(request)
                continue
            parts = (before.token_ids.tolist(), before.log_probs.tolist(), before.versions.tolist())
            output = Output(request.id, *parts, before.finish_reason)
            if output.finish_reason == "unfinished":
                self.engine.add(dataclasses.replace(request, so_far=output))
            else:
                self._submit(output)

    def _submit(self, output: Output) -> None:
        key, number = output.id
        work = self.working[key]
        work.outputs[number] = output
        p = work.prompt
        self.pool.submit(output.id, p.data_source, self._text(output), p.ground_truth, p.extra_info)

    def _text(self, output: Output) -> str:
        return self.tokenizer.decode(output.token_ids, skip_special_tokens=True)

    def _overlong(self, length: int) -> float:
        a = self.args
        if not a.overlong_buffer_len:
            return 0.0
        return overlong_penalty(length, a.max_response_length, a.overlong_buffer_len, a.overlong_penalty_factor)


def _response(
    output: Output, score: float | None = 0.0, extra: dict[str, float] | None = None, error: str | None = None
) -> Response:
    return Response(
        token_ids=np.array(output.token_ids, np.int32),
        log_probs=np.array(output.log_probs, np.float32),
        versions=np.array(output.versions, np.int32),
        finish_reason=output.finish_reason,
        score=score,
        extra=extra or {},
        error=error,
    )


def gather_groups(mine: list[Group]) -> list[Group]:
    """Every rank's groups on every rank, in ticket order."""
    shares = dist.all_gather_bytes(join_records([group.to_bytes() for group in mine]))
    groups = [Group.from_bytes(record) for share in shares for record in split_records(share)]
    return sorted(groups, key=lambda group: group.ticket)


def validate_on_all_ranks(generator: Generator, prompts: PromptDataset, ranks: dist.Ranks) -> list[dict]:
    """The validation set split over the ranks; every rank gets all rows, in order."""
    mine = generator.validate(prompts, range(ranks.rank, len(prompts), ranks.world_size))
    gathered = dist.all_gather_bytes(json.dumps(mine).encode())
    return sorted((row for rows in gathered for row in json.loads(rows)), key=lambda row: row["index"])


def validation_metrics(rows: list[dict]) -> dict[str, float]:
    """verl's val-core/<data_source>/acc/mean@n and pass@n (the best of the n), averaged over the prompts of each source, and
    how many responses could not be scored, which count as wrong."""
    by_prompt: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        by_prompt.setdefault((row["data_source"], row["index"]), []).append(row["acc"])
    metrics = {"val-aux/reward/unscored": sum(row["error"] is not None for row in rows)}
    for source in dict.fromkeys(source for source, _ in by_prompt):
        prompts = [acc for (s, _), acc in by_prompt.items() if s == source]
        n = len(prompts[0])
        metrics[f"val-core/{source}/acc/mean@{n}"] = sum(sum(acc) / n for acc in prompts) / len(prompts)
        if n > 1:
            metrics[f"val-core/{source}/acc/pass@{n}"] = sum(max(acc) for acc in prompts) / len(prompts)
    return metrics


def all_events(pool: ScoringPool) -> dict[str, int]:
    """How many responses could not be scored so far, by kind, over all ranks. A collective."""
    counts = dist.all_reduce_sum(torch.tensor([float(pool.events[kind]) for kind in EVENTS]))
    return {kind: int(count) for kind, count in zip(EVENTS, counts, strict=True)}


def event_metrics(events: Mapping[str, int]) -> dict[str, int]:
    """reward/events/<kind>, whose counts are these."""
    return {f"reward/events/{kind}": events.get(kind, 0) for kind in EVENTS}

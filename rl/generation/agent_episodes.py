"""Responses of agents that own their loop: each call is a turn, and a call that extends no earlier one begins a new history.

A new history has a separate prompt: that of a sub-agent, or a conversation that the agent has compressed. To the engine it is a
request with a different prompt. At the end, all of a response's histories are joined into one response: one score, one
advantage, and one budget of tokens, in which the further prompts count, although they are masked.
"""

import dataclasses
import zlib

import numpy as np

from rl.generation.engine import Output, request_seed
from rl.generation.episode import History, Id, Named, nothing
from rl.generation.episodes import Episodes
from rl.generation.generator import Added, Key, OpenGroup
from rl.model import sampling_mask
from rl.ranks.timers import Timers
from user_processes.pictures import files_of


class AgentEpisodes(Episodes):
    """The episodes of a generator whose environments are agents."""

    waits_in_outages = False

    def __init__(self, *given):
        super().__init__(*given)
        self._streams: dict[Id, tuple[str, int]] = {}  # of open calls: its name, and the turn's tokens that it has

    # -- the generator's questions

    def start(self, key: Key, work: OpenGroup, before: list[Output | None], prompt: Named | None) -> list[Output]:
        """Start a prompt's episodes. Recorded ones start again from the beginning, because an agent cannot be replayed."""
        work.added.clear()
        super().start(key, work, [None] * len(before), None)
        for request, output in zip(work.requests, before, strict=True):
            self._of[request.id].restarts = int(output is not None)
        return []

    def decode(self, timer: Timers) -> list[Output] | None:
        """Do as for all episodes. Pass what was sampled on to the agents that want their turns token by token."""
        outputs = super().decode(timer)
        if self._streams and self.engine_ranks.is_leader:
            parts = {}
            for id, tokens in self.engine.tokens_of(self._streams).items():
                name, passed = self._streams[id]
                if new := tokens[self._of[id].now.at + passed :]:
                    parts[name] = new
                    self._streams[id] = name, passed + len(new)
            if parts:
                self.environments.pass_on(parts)
        return outputs

    def unfinished(self) -> list[Output]:
        """Return all unfinished responses so far, without routes: those of a later history do not fit the prompt, and a resumed
        run does not use them."""
        return [dataclasses.replace(output, routes=None) for output in super().unfinished()]

    def extra(self, id: Id) -> dict[str, float]:
        return super().extra(id) | {"forks": len(self._of[id].histories) - 1 if id in self._of else 0}

    def drop(self, key: Key) -> None:
        super().drop(key)
        self._streams = {id: stream for id, stream in self._streams.items() if id[0] != key}

    # -- turn after turn

    def _add(self, id: Id) -> None:
        episode = self._of[id]
        so_far = episode.now.output
        if stream := episode.wants.get("stream"):
            self._streams[id] = stream, 0
        try:
            super()._add(id)
        except ValueError as error:
            if not episode.wants.get("schema"):
                raise
            self._cannot_keep_to_schema(id, so_far, str(error))

    def _turn_ended(self, output: Output) -> None:
        self._streams.pop(output.id, None)
        if len(output.token_ids) > self._of[output.id].now.at:
            super()._turn_ended(output)
        else:
            self._cannot_keep_to_schema(output.id, output, "no token of the vocabulary fits")

    def _cannot_keep_to_schema(self, id: Id, so_far: Output | None, why: str) -> None:
        episode = self._of[id]
        episode.in_engine = False
        episode.now.output = so_far
        self._refuse(id, f"the schema of a call {episode.wants['schema']:.100}: {why}")

    def _begin(self, id: Id, said: tuple) -> None:
        """Start a response with its agent's first call. If it is not that of the group, it begins a separate history, and the
        first one, which follows the group's prompt, stays empty."""
        prompt, files = said
        episode = self._of[id]
        if said != self._prompts[id[0]]:
            episode.now.output = nothing(id)
            episode.first = 1
            self._turn_to(id, 1, prompt)
            episode.now.added.images += files_of({"images": files or ()})
        else:
            episode.now.request = dataclasses.replace(episode.now.request, prompt_ids=prompt)
        if self._room(id) > 0:
            self._add(id)
        else:
            wrong = f"the first call is not that of its group, and its {len(prompt)} tokens leave none of --max-response-length"
            self._refuse(id, wrong)

    def _answered(self, id: Id, answer: dict) -> None:
        """Continue with the agent's next call. Its tokens are a new history's prompt, or are appended to an existing one."""
        if not answer["done"]:
            episode = self._of[id]
            number = episode.first + answer["history"]
            begins = number == len(episode.histories)
            if number != episode.active:
                self._turn_to(id, number, answer["ids"])
            if begins:
                answer = answer | {"ids": []}
        super()._answered(id, answer)

    def _turn_to(self, id: Id, number: int, prompt: list[int]) -> None:
        """Make another history the active one. prompt: of a new history."""
        episode = self._of[id]
        if number == len(episode.histories):
            request = episode.histories[0].request
            same = sum(history.request.prompt_ids == prompt for history in episode.histories)
            seed = request_seed(request.seed, zlib.crc32(np.array(prompt, np.int32).tobytes()), same)
            request = dataclasses.replace(request, prompt_ids=prompt, seed=seed)
            episode.histories.append(History(request, nothing(id)))
        episode.active = number
        self.working[id[0]].added[id[1]] = episode.now.added

    def _room(self, id: Id) -> int:
        """Return the most tokens of the active history. The response's budget also includes the other histories, and the
        prompts of all but the first."""
        episode = self._of[id]
        others = sum(len(of.output.token_ids) for i, of in enumerate(episode.histories) if i != episode.active)
        return super()._room(id) - others - sum(len(of.request.prompt_ids) for of in episode.histories[1:])

    # -- the end

    def _whole(self, id: Id) -> History:
        """Return all histories as one. Each one after the first begins with its prompt, which is masked; one that the
        response's end has kept from its first turn is left out. Those of calls at once arrive in any order: all are sorted by
        their prompts, after that of the agent's first call, and have the random numbers of these."""
        episode = self._of[id]
        if len(episode.histories) == 1:
            return super()._whole(id)
        own, further = episode.histories[: episode.first + 1], episode.histories[episode.first + 1 :]
        first, *others = own + sorted(further, key=lambda its: its.request.prompt_ids)
        histories = [first, *(history for history in others if history.output.token_ids)]
        tokens, log_probs, versions, seconds, parts = [], [], [], [], []
        added = Added(histories=[] if len(histories) > 1 else None)
        for number, history in enumerate(histories):
            prompt = history.request.prompt_ids if number else []
            output = history.output
            tokens += [*prompt, *output.token_ids]
            log_probs += [*[0.0] * len(prompt), *output.log_probs]
            versions += [*output.versions[:1] * len(prompt), *output.versions]
            parts += [(None, len(prompt)), (output.support, len(output.token_ids))]
            seconds += history.seconds
            added.mask = np.concatenate([added.mask, np.zeros(len(prompt), bool), history.sampled()])
            added.images += history.added.images
            if len(histories) > 1:
                added.histories.append(len(prompt) + len(output.token_ids))
        known = sampling_mask.of_responses(*zip(*parts, strict=True))
        known = None if known is None else known.numpy()
        outputs = [history.output for history in histories]
        routes = _joined_routes(outputs, len(self.working[id[0]].prompt.ids)) if tokens else None
        output = Output(id, tokens, log_probs, versions, "unfinished", routes, known)
        return History(first.request, output, added, seconds=seconds)


def _joined_routes(outputs: list[Output], prompt: int) -> np.ndarray | None:
    """Return the routes of all histories, each with those of its prompt. No model got the last token of a history: the learner
    does not replay its row, nor the rows of the group's prompt if the first history is empty. prompt: number of tokens of the
    group's prompt."""
    known = [output.routes for output in outputs if output.routes is not None]
    if not known:
        return None
    nothing = np.broadcast_to(np.arange(known[0].shape[2], dtype=known[0].dtype), (prompt, *known[0].shape[1:]))
    rows = [nothing[1:] if outputs[0].routes is None else outputs[0].routes]
    for output in outputs[1:]:
        if output.routes is not None:
            rows += [nothing[:1], output.routes]
    return np.concatenate(rows)

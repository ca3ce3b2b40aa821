"""Responses of agents that own their loop: each call is a turn, and a call that extends no earlier one begins a new history.

A new history has a separate prompt: that of a sub-agent, or a conversation that the agent has compressed. To the engine it is a
request with a different prompt. At the end, all of a response's histories are joined into one response: one score, one
advantage, and one budget of tokens, in which the further prompts count, although they are masked.
"""

import dataclasses
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl.generation.engine import Output, Request, request_seed
from rl.generation.episode import Id, Named
from rl.generation.episodes import Episodes
from rl.generation.responses import Added, Key, OpenGroup
from rl.model import sampling_mask
from rl.ranks.timers import Timers

if TYPE_CHECKING:
    from rl.data.image_prompts import Images


@dataclass
class History:
    """One of a response's histories. While it is active, its current state is in Episode and OpenGroup instead."""

    request: Request
    output: Output
    at: int = 0
    seconds: list[list[float]] = field(default_factory=list)  # of its turns
    added: Added = field(default_factory=Added)  # with the images of its prompt, if it is a later one

    def sampled(self) -> np.ndarray:
        return self.added.sampled(len(self.output.token_ids))


@dataclass
class Histories:
    """A response's histories. The first follows the group's prompt, and is empty if the agent's first call has another one."""

    all: list[History]
    first: int = 0  # the number of the history that the agent's first call began
    active: int = 0


class AgentEpisodes(Episodes):
    """The episodes of a generator whose environments are agents."""

    waits_in_outages = False

    def __init__(self, *given):
        super().__init__(*given)
        self._histories: dict[Id, Histories] = {}
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
                if new := tokens[self._of[id].at + passed :]:
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
        return super().extra(id) | {"forks": len(self._histories[id].all) - 1 if id in self._histories else 0}

    def drop(self, key: Key) -> None:
        super().drop(key)
        self._histories = {id: of for id, of in self._histories.items() if id[0] != key}
        self._streams = {id: stream for id, stream in self._streams.items() if id[0] != key}

    # -- turn after turn

    def _was_reset(self, id: Id, answer: dict) -> None:
        self._note_options(id, answer)
        super()._was_reset(id, answer)

    def _note_options(self, id: Id, answer: dict) -> None:
        """Note what an agent's call asks of the next turn."""
        episode = self._of[id]
        episode.most = answer.get("most")
        episode.schema = answer.get("schema", "")
        episode.stop = tuple(answer.get("stop", ()))
        if answer.get("stream"):
            self._streams[id] = answer["stream"], 0

    def _add(self, id: Id, so_far: Output | None) -> None:
        try:
            super()._add(id, so_far)
        except ValueError as error:
            if not self._of[id].schema:
                raise
            self._cannot_keep_to_schema(id, so_far, str(error))

    def _turn_ended(self, output: Output) -> None:
        self._streams.pop(output.id, None)
        if len(output.token_ids) > self._of[output.id].at:
            super()._turn_ended(output)
        else:
            self._cannot_keep_to_schema(output.id, output, "no token of the vocabulary fits")

    def _cannot_keep_to_schema(self, id: Id, so_far: Output | None, why: str) -> None:
        self._of[id].in_engine = False
        self._of[id].output = so_far
        self._refuse(id, f"the schema of a call {self._of[id].schema:.100}: {why}")

    def _begin(self, id: Id, said: tuple) -> None:
        """Start a response with its agent's first call. If it is not that of the group, it begins a separate history."""
        prompt, files = said
        requests = self.working[id[0]].requests
        first = History(requests[id[1]], Output(id, [], [], [], "unfinished"))
        is_other = said != self._prompts[id[0]]
        self._histories[id] = Histories([first], first=int(is_other))
        if is_other:
            self._turn_to(id, 1, prompt)
            self._show(id, {"images": files or ()})
        else:
            first.request = requests[id[1]] = dataclasses.replace(first.request, prompt_ids=prompt)
        if self._room(id) > 0:
            self._add(id, None)
        else:
            wrong = f"the first call is not that of its group, and its {len(prompt)} tokens leave none of --max-response-length"
            self._refuse(id, wrong)

    def _answered(self, id: Id, answer: dict) -> None:
        """Continue with the agent's next call. Its tokens are a new history's prompt, or are appended to an existing one."""
        if not answer["done"]:
            self._note_options(id, answer)
            of = self._histories[id]
            number = of.first + answer["history"]
            begins = number == len(of.all)
            if number != of.active:
                self._turn_to(id, number, answer["ids"])
            if begins:
                answer = answer | {"ids": []}
        super()._answered(id, answer)

    def _turn_to(self, id: Id, number: int, prompt: list[int]) -> None:
        """Make another history the active one. prompt: of a new history."""
        of = self._histories[id]
        episode = self._of[id]
        work = self.working[id[0]]
        self._note(id)
        if number == len(of.all):
            request = of.all[0].request
            same = sum(history.request.prompt_ids == prompt for history in of.all)
            seed = request_seed(request.seed, zlib.crc32(np.array(prompt, np.int32).tobytes()), same)
            request = dataclasses.replace(request, prompt_ids=prompt, seed=seed)
            of.all.append(History(request, Output(id, [], [], [], "unfinished")))
        history = of.all[number]
        of.active = number
        episode.output, episode.at = history.output, history.at
        work.added[id[1]] = history.added
        work.requests[id[1]] = history.request

    def _note(self, id: Id) -> None:
        """Write the active history's state down."""
        of = self._histories[id]
        episode = self._of[id]
        history = of.all[of.active]
        history.output = episode.output or history.output
        history.at = episode.at
        history.seconds += episode.seconds[sum(len(its.seconds) for its in of.all) :]
        history.added = self.working[id[0]].added.pop(id[1], history.added)

    def _images_of_prompt(self, id: Id) -> "Images | None":
        return None if self._histories[id].active else super()._images_of_prompt(id)

    def _room(self, id: Id) -> int:
        """Return the most tokens of the active history. The response's budget also includes the other histories, and the
        prompts of all but the first."""
        of = self._histories[id]
        others = sum(len(history.output.token_ids) for i, history in enumerate(of.all) if i != of.active)
        return super()._room(id) - others - sum(len(history.request.prompt_ids) for history in of.all[1:])

    # -- the end

    def _finish(self, id: Id, reason: str) -> None:
        if id in self._histories and len(self._histories[id].all) > 1:
            self._join(id)
        super()._finish(id, reason)

    def _join(self, id: Id) -> None:
        """Join all histories into one output. Each one after the first begins with its prompt, which is masked; one that the
        response's end has kept from its first turn is left out. Those of calls at once arrive in any order: all are sorted by
        their prompts, after that of the agent's first call, and have the random numbers of these."""
        self._note(id)
        work = self.working[id[0]]
        of = self._histories[id]
        first, *others = of.all[: of.first + 1] + sorted(of.all[of.first + 1 :], key=lambda its: its.request.prompt_ids)
        others = [history for history in others if history.output.token_ids]
        tokens, log_probs, versions = list(first.output.token_ids), list(first.output.log_probs), list(first.output.versions)
        masks = [first.sampled()]
        lengths = [len(tokens)]
        parts = [(first.output.support, len(tokens))]
        for history in others:
            output = history.output
            prompt = history.request.prompt_ids
            tokens += [*prompt, *output.token_ids]
            log_probs += [0.0] * len(prompt) + output.log_probs
            versions += output.versions[:1] * len(prompt) + output.versions
            masks += [np.zeros(len(prompt), bool), history.sampled()]
            lengths.append(len(prompt) + len(output.token_ids))
            parts += [(None, len(prompt)), (output.support, len(output.token_ids))]
        known = sampling_mask.of_responses(*zip(*parts, strict=True))
        known = None if known is None else known.numpy()
        routes = _joined_routes([first.output, *(h.output for h in others)], len(work.prompt.ids)) if tokens else None
        self._of[id].output = Output(id, tokens, log_probs, versions, "unfinished", routes, known)
        self._of[id].seconds = [of_turn for history in (first, *others) for of_turn in history.seconds]
        images = [file for history in (first, *others) for file in history.added.images]
        work.added[id[1]] = Added(np.concatenate(masks), images, lengths if len(lengths) > 1 else None)


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

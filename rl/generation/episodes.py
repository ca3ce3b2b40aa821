"""Responses of several turns (--env, --tools): decides whose turn it is and which tokens are appended.

To the engine an episode is one response that is continued: the environment's answer is appended to its tokens, and the request
is added again with them as its `so_far`. The mask separates the policy's tokens from the environment's, so runs of equal mask
values are the turns. A resumed run replays its episodes from these: the environment has to repeat the recorded answers.

If several ranks share an engine (--rollout-tp), only the first has processes. All ranks ask the same questions, so each poll
needs only one message: the answers that the first rank read.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from rl.data.job import Job
from rl.environments.args import EnvironmentArgs
from rl.environments.pool import Environments
from rl.generation.engine import Engine, Output, request_seed
from rl.generation.engine_ranks import EngineRanks
from rl.generation.episode import Episode
from rl.generation.responses import VALIDATION, Responses, Work
from rl.model import sampling_mask
from rl.ranks.timers import Timers
from rl.rewards.pool import Score, can_score

OF_GROUP = 2**32 - 1  # replaces a response's number in the seed that its group's environments share
WAIT = 5e-3  # seconds to wait for an environment if there is nothing to sample
BY_ROWS = 2  # processes per response that the engine can decode at once


class Episodes(Responses):
    """The episodes of a generator."""

    have_turns = True

    def __init__(self, job: Job, engine: Engine, engine_ranks: EngineRanks, args: EnvironmentArgs, end_tokens: set[int]):
        super().__init__(engine)
        self.job, self.engine_ranks, self.args, self.end_tokens = job, engine_ranks, args, end_tokens
        self.environments: Environments = job.environments
        self.scores_at_end = self.environments.ready["scores_at_end"]
        self.paused_below = 0  # smaller keys were put aside: their answers wait
        self._of: dict[tuple[int, int], Episode] = {}
        self._processes: dict[tuple[int, int], bool] = {}  # episodes with a process -> whether it owes an answer
        self._queue: list[int] = []  # keys without environments yet
        self._resetting: set[tuple[int, int]] = set()  # episodes that have not begun
        self._prompts: dict[int, list[int] | None] = {}  # by key: the prompt that the first reset returned
        self._answers: list[tuple[tuple[int, int], dict]] = []
        self._ended: list[Output] = []
        self._replayed: list[tuple] | None = None  # requests for the engine, collected during `replay`

    # -- the generator's questions

    @property
    def num_unfinished(self) -> int:
        return self.engine.num_unfinished + len(self._resetting)

    def begin(self, key: int, work: Work, before: list[Output | None], prompt: list[int] | None) -> list[Output]:
        """Start a prompt's episodes, or replay the recorded ones."""
        self.working[key] = work
        for request, output in zip(work.requests, before, strict=True):
            self._of[request.id] = Episode(output, prompt)
            self._resetting.add(request.id)
        self._queue.append(key)
        self._admit()
        return []

    def decode(self, timer: Timers) -> list[Output] | None:
        """Step the engine once and read the environments' answers. Return the episodes that ended; None if neither the engine
        nor an environment is at work. A turn that the budget cuts is the last, and its tools do not run."""
        with timer("env"):
            self._admit()
            at_work = any(self._processes.values())
            idle = at_work and (not self.engine.num_unfinished or self._blocked)
            if any(key >= self.paused_below for key, _ in self._processes):
                self._poll(WAIT if idle else 0.0)
            if not self._blocked:
                self._take()
        outputs = None if self._blocked else super().decode(timer)
        for output in outputs or ():
            self._turn_ended(output)
        ended = self._ended
        self._ended = []
        return ended if ended or at_work or outputs is not None else None

    @property
    def _blocked(self) -> bool:
        """Whether the engine waits (--env-lock-step)."""
        return self.args.in_lock_step and any(self._processes.values())

    def replay(self) -> None:
        """Replay all recorded episodes. Give them to the engine as if the run had not stopped: first those that were stopped
        within a turn, then those that waited for their environment."""
        self._replayed = []
        while self._queue or any(self._processes.values()):
            self._admit()
            self._poll(1.0)
            if not self._blocked:
                self._take()
        for _, _, request in sorted(self._replayed, key=lambda item: item[:2]):
            self.engine.add(request)
        self._replayed = None

    def unfinished(self) -> list[Output]:
        """Return all unfinished responses so far, including those that the engine does not have."""
        elsewhere = {id: episode.output for id, episode in self._of.items() if not episode.in_engine}
        return super().unfinished() + [output or Output(id, [], [], [], "unfinished") for id, output in elsewhere.items()]

    def put_aside(self, below: int) -> None:
        """Take all unfinished responses out of the engine. Their environments' answers wait."""
        super().put_aside(below)
        self.paused_below = below

    def proceed(self) -> None:
        self.paused_below = 0
        super().proceed()

    def score(self, id: tuple[int, int]) -> Score | None:
        """Return an ended episode's score by its environment, 0 if it was cut before; None if a verifier has to score it."""
        episode = self._of[id]
        if episode.event or episode.rewards:
            return episode.event or Score(sum(reward for _, reward in episode.rewards))
        if can_score(self.working[id[0]].prompt.data_source, self.args):
            return None
        if episode.cut:
            return Score(0.0)
        return Score(None, event="bad_value", message="neither the environment nor a verifier of its data_source scored it")

    def extra(self, id: tuple[int, int]) -> dict[str, float]:
        """Return further numbers of an ended episode; none if its prompt's images could not be prepared."""
        if id not in self._of:
            return {}
        episode = self._of[id]
        mask = self.working[id[0]].mask(id[1], len(episode.output.token_ids))
        sampled = len(episode.output.token_ids) if mask is None else int(mask.sum())
        return {
            "turns": episode.turns,
            "tokens_per_turn": sampled / max(1, episode.turns),
            "tool_calls": episode.calls,
            "malformed_calls": episode.malformed,
            "cut_by_turns": float(episode.cut == "turns"),
            "cut_by_length": float(episode.cut == "length"),
            "environment_seconds": episode.seconds,
            "cached_tokens": episode.cached,
            "restarts": episode.restarts,
        }

    def rewards(self, id: tuple[int, int]) -> list[list] | None:
        """Return [token, reward] for each turn with a reward, with --turn-rewards and if the episode could be scored."""
        episode = self._of.get(id)
        return episode.rewards if episode and self.args.turn_rewards and not episode.event else None

    def drop(self, key: int) -> None:
        for request in self.working[key].requests:
            del self._of[request.id]
        self._prompts.pop(key, None)
        super().drop(key)

    def close(self) -> None:
        self.environments.close()

    # -- the processes

    def _fork(self, id: tuple[int, int]) -> None:
        key, number = id
        prompt = self.working[key].prompt
        known = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, "extra_info": prompt.extra_info}
        seeds = {"seed": request_seed(self.args.seed, key, OF_GROUP), "own_seed": request_seed(self.args.seed, key, number)}
        self._processes[id] = True
        if self.engine_ranks.is_leader:
            self.environments.begin(id, row=prompt.row | known, split="val" if key >= VALIDATION else "train", **seeds)

    def _ask(self, id: tuple[int, int], what: str, **item: Any) -> None:
        if id in self._processes:  # otherwise it has failed, and its event is in `_answers`
            self._processes[id] = True
            if self.engine_ranks.is_leader:
                self.environments.ask(id, what, **item)

    def _end_process(self, id: tuple[int, int]) -> None:
        self._processes.pop(id, None)
        if self.engine_ranks.is_leader:
            self.environments.end(id)

    def _poll(self, wait: float) -> None:
        """Read answers; wait up to `wait` seconds for one. Collective over the engine's ranks, if there is any process."""
        if not self._processes:
            return
        answers = self.environments.poll(wait) if self.engine_ranks.is_leader else []
        for id, answer in self.engine_ranks.agree(answers):
            id = tuple(id)
            self._answers.append((id, answer))
            if "event" in answer:
                self._processes.pop(id, None)
            elif id in self._processes:
                self._processes[id] = False

    # -- the beginning

    def _admit(self) -> None:
        """Fork the environments of queued prompts. Episodes that were put aside do not count towards the limit of processes."""
        for key in [key for key in self._queue if key >= self.paused_below]:
            at_work = sum(key >= self.paused_below for key, _ in self._processes)
            if at_work >= BY_ROWS * self.args.max_num_seqs and self._replayed is None:
                return
            self._queue.remove(key)
            for request in self.working[key].requests:
                self._fork(request.id)

    def _was_reset(self, id: tuple[int, int], prompt: list[int] | None) -> None:
        """Start an episode. The first of a group sets the group's prompt. prompt: None if the reset adds nothing to it."""
        key = id[0]
        work = self.working[key]
        self._resetting.discard(id)
        if not prompt and not work.prompt.ids:
            self._refuse(id, "the row has no prompt, and reset adds no message to it")
            return
        if key not in self._prompts:
            if prompt and len(prompt) > self.args.max_prompt_length:
                self._refuse(id, f"the prompt has become {len(prompt)} tokens long, more than --max-prompt-length")
                return
            if prompt and work.prompt.images:
                self._refuse(id, "a prompt that has images cannot be added to")
                return
            if prompt:
                work.prompt = dataclasses.replace(work.prompt, ids=prompt, text=self.job.tokenizer.decode(prompt))
            self._prompts[key] = prompt
        self._begin(id, prompt)

    def _begin(self, id: tuple[int, int], prompt: list[int] | None) -> None:
        """Start an episode whose group has a prompt, which must be this episode's as well."""
        key, number = id
        work = self.working[key]
        if prompt != self._prompts[key]:
            self._refuse(id, "reset adds another prompt than in its group")
            return
        if self._of[id].output and self._of[id].prompt != work.prompt.ids:
            self._forget(id)
        work.requests[number] = dataclasses.replace(work.requests[number], prompt_ids=work.prompt.ids)
        self._start(id)

    def _refuse(self, id: tuple[int, int], wrong: str) -> None:
        self._fail(id, {"event": "bad_value", "message": wrong})

    def _start(self, id: tuple[int, int]) -> None:
        episode = self._of[id]
        if episode.output is None:
            self._add(id, None)
            return
        tokens = len(episode.output.token_ids)
        mask = self.working[id[0]].mask(id[1], tokens)
        runs = [[True] * tokens] if mask is None else [list(run) for _, run in itertools.groupby(mask.tolist())]
        episode.again.extend(map(len, runs))
        self._play(id)

    # -- turn after turn

    def _turn_ended(self, output: Output) -> None:
        """Give a turn that the engine has finished to its environment, unless it is the last."""
        episode = self._of[output.id]
        episode.cached += output.cached if episode.turns else 0
        episode.output = output
        episode.in_engine = False
        if episode.event:
            self._finish(output.id, "stop")
        elif output.finish_reason == "length":
            self._cut(output.id)
        else:
            self._say(output.id, len(output.token_ids))

    def _take(self) -> None:
        """Act on the answers: in lock step by key, not in order of arrival."""
        answers = [item for item in self._answers if item[0][0] >= self.paused_below]
        self._answers = [item for item in self._answers if item[0][0] < self.paused_below]
        for id, answer in sorted(answers, key=lambda item: item[0]) if self.args.in_lock_step else answers:
            if id not in self._of or self._of[id].is_over:
                continue
            if "event" in answer:
                self._fail(id, answer)
            elif answer["asked"] == "reset":
                self._of[id].most = answer.get("most")
                self._was_reset(id, answer.get("prompt"))
            elif answer["asked"] == "end":
                self._of[id].add(answer)
                self._finish(id, "length")
            else:
                self._answered(id, answer)

    def _say(self, id: tuple[int, int], end: int) -> None:
        """Give the environment the model's turn, which ends before token `end`."""
        episode = self._of[id]
        episode.turns += 1
        self._ask(id, "step", ids=episode.output.token_ids[episode.at : end])
        episode.at = end

    def _answered(self, id: tuple[int, int], answer: dict) -> None:
        episode = self._of[id]
        ids = answer["ids"]
        episode.add(answer)
        if episode.again:
            recorded = episode.output.token_ids[episode.at : episode.at + episode.again.popleft()]
            if answer["done"] or recorded != ids:  # a different answer: the episode starts again
                self._end_process(id)
                self._forget(id)
                self._fork(id)
                return
            self._append(id, len(ids))
            if episode.again:
                self._play(id)
            else:
                self._add(id, episode.output)
        elif answer["done"]:
            self._finish(id, "stop")
        elif episode.turns >= self.args.max_turns or episode.at + len(ids) >= self._room(id):
            self._end(id, "turns" if episode.turns >= self.args.max_turns else "length")
        else:
            o = episode.output
            lists = ([*o.token_ids, *ids], [*o.log_probs, *[0.0] * len(ids)], [*o.versions, *o.versions[-1:] * len(ids)])
            self._append(id, len(ids))
            known = (
                None if o.support is None else np.concatenate([o.support, sampling_mask.nothing(len(ids), o.support.shape[1])])
            )
            self._add(id, Output(id, *lists, "unfinished", o.routes, known))

    def _room(self, id: tuple[int, int]) -> int:
        return self.args.max_response_length

    def _append(self, id: tuple[int, int], tokens: int) -> None:
        """Mask the next `tokens` tokens, which are the environment's."""
        episode = self._of[id]
        masks = self.working[id[0]].masks
        known = masks.get(id[1], np.zeros(0, bool))
        if len(known) < episode.at + tokens:  # otherwise the mask was recorded
            turn = np.ones(episode.at - len(known), bool)
            masks[id[1]] = np.concatenate([known, turn, np.zeros(tokens, bool)])
        episode.at += tokens

    def _add(self, id: tuple[int, int], so_far: Output | None) -> None:
        """Let the engine sample the next turn, before turns of prompts that began later. If responses keep their KV cache
        across updates, turns keep it too."""
        episode = self._of[id]
        was_playing = bool(episode.output) and episode.output.finish_reason == "unfinished"
        episode.output = None
        episode.in_engine = True
        so_far = so_far and dataclasses.replace(so_far, finish_reason="unfinished")
        kept = so_far.versions[0] if so_far and getattr(self.args.schedule, "partial_rollout", "") == "keep" else None
        request = self.working[id[0]].requests[id[1]]
        request = dataclasses.replace(request, so_far=so_far, priority=id[0], kv_version=kept)
        if self._replayed is None:
            self.engine.add(request)
        else:
            self._replayed.append((not was_playing, id, request))

    # -- the replay

    def _play(self, id: tuple[int, int]) -> None:
        """Replay the next recorded turn; the last may be incomplete, because the run or the budget ended."""
        episode = self._of[id]
        end = episode.at + episode.again.popleft()
        if episode.again or episode.output.token_ids[end - 1] in self.end_tokens:
            self._say(id, end)
        elif episode.output.finish_reason == "unfinished":
            self._add(id, episode.output)
        else:
            self._cut(id)

    def _forget(self, id: tuple[int, int]) -> None:
        self.working[id[0]].masks.pop(id[1], None)
        self._of[id] = Episode(restarts=self._of[id].restarts + 1)

    # -- the end

    def _cut(self, id: tuple[int, int]) -> None:
        """End an episode whose turn the budget has cut. Its environment does not get the turn."""
        episode = self._of[id]
        episode.turns += 1
        episode.at = len(episode.output.token_ids)
        self._end(id, "length")

    def _end(self, id: tuple[int, int], cut: str) -> None:
        """End an episode that its environment has not ended. The environment may still have a reward for it."""
        episode = self._of[id]
        episode.cut = cut
        if self.scores_at_end and not episode.rewards:
            self._ask(id, "end", ids=episode.output.token_ids)
        else:
            self._finish(id, "length")

    def _finish(self, id: tuple[int, int], reason: str) -> None:
        episode = self._of[id]
        self._end_process(id)
        episode.is_over = True
        episode.output = dataclasses.replace(episode.output, finish_reason=reason)
        self._ended.append(episode.output)

    def _fail(self, id: tuple[int, int], answer: dict) -> None:
        """End an episode whose environment has failed. Only this response is lost."""
        episode = self._of[id]
        self._end_process(id)
        episode.event = Score(None, event=answer["event"], message=answer["message"])
        if episode.in_engine:  # the turn under way is the last
            return
        episode.output = episode.output or Output(id, [], [], [], "length")
        self._resetting.discard(id)
        self._finish(id, "stop")

"""Responses of several turns (--env, --tools): decides whose turn it is and which tokens are appended.

To the engine an episode is one response that is continued: the environment's answer is appended to its tokens, and the request
is added again with them as its `so_far`. The mask separates the policy's tokens from the environment's, so runs of equal mask
values are the turns. A resumed run plays its episodes again, with these turns in place of the engine's, and the environment
has to repeat the recorded answers. So does an episode whose environment failed in an outage (rl/rewards/outages.py), once it is
over.

If several ranks share an engine (--rollout-tp), only the first has processes. All ranks poll in the same order, so each poll
needs one message: the answers that the first rank has read.
"""

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.data.job import Job
from rl.environments.pool import Environments
from rl.generation.engine import Engine, EngineRanks, Output, Request, request_seed
from rl.generation.episode import Episode, History, Id, Named, images_of, named_of, nothing, with_answer
from rl.generation.generator import Key, OpenGroup, Responses
from rl.generation.stop_strings import StopStrings
from rl.ranks.timers import Timers
from rl.rewards.outages import Outages
from rl.rewards.pool import can_score
from rl.rewards.score import Score
from user_processes.pictures import files_of

if TYPE_CHECKING:
    from rl.data.image_prompts import Images

OF_GROUP = 2**32 - 1  # replaces a response's number in the seed that its group's environments share
WAIT = 5e-3  # seconds to wait for an environment if there is nothing to sample
BY_ROWS = 2  # processes per response that the engine can decode at once


class Episodes(Responses):
    """The episodes of a generator."""

    waits_in_outages = True  # can replay an episode of this start

    def __init__(self, job: Job, engine: Engine, engine_ranks: EngineRanks, args, end_tokens: set[int]):
        super().__init__(engine)
        self.job, self.engine_ranks, self.args, self.end_tokens = job, engine_ranks, args, end_tokens
        self.environments: Environments = job.environments
        self.paused_below = Key(False, 0)  # smaller keys are paused: their answers wait
        self._of: dict[Id, Episode] = {}
        self._processes: dict[Id, bool] = {}  # episodes with a process -> whether it owes an answer
        self._queue: list[Key] = []  # keys without environments yet
        self._resetting: set[Id] = set()  # episodes that have not begun
        self._prompts: dict[Key, tuple] = {}  # by key: the prompt and images that the first reset returned
        self._answers: list[tuple[Id, dict]] = []
        self._ended: list[Output] = []
        self._in_lock_step = not args.schedule.split and not args.environment.serve_policy  # no result depends on time
        self._has_recorded = False  # whether `resume` has to replay recorded episodes
        self._requests: list[tuple] | None = None  # for the engine, collected by `_replay`
        self._stop_of = functools.lru_cache(self._make_stop)
        self._now = 0.0  # of the engine's first rank, so that all its ranks decide alike
        patience = args.reward.outage_timeout if self.waits_in_outages and not args.environment.from_tape else 0.0
        says = engine_ranks.is_leader
        again = self._play_again
        self._outages = Outages(patience, "the environment", again, lambda: self._now, says, repeats=False)

    # -- the generator's questions

    @property
    def num_unfinished(self) -> int:
        return self.engine.num_unfinished + len(self._resetting) + self._outages.waiting

    def start(self, key: Key, work: OpenGroup, before: list[Output | None], prompt: Named | None) -> list[Output]:
        """Start a prompt's episodes, or those of the record."""
        self._has_recorded |= any(before)
        self.working[key] = work
        for request, output in zip(work.requests, before, strict=True):
            self._of[request.id] = self._episode(request, output, prompt)
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
            if self._outages.waiting or any(key >= self.paused_below for key, _ in self._processes):
                self._poll(WAIT if idle else 0.0)
            if not self._blocked:
                self._take()
                if self._outages.waiting:
                    self._lose(self._outages.look(not (self.engine.num_unfinished or self._processes or self._queue)))
        outputs = None if self._blocked else super().decode(timer)
        for output in outputs or ():
            self._turn_ended(output)
        ended = self._ended
        self._ended = []
        return ended if ended or at_work or outputs is not None else None

    @property
    def _blocked(self) -> bool:
        """Whether the engine waits for the environments (`_in_lock_step`)."""
        return self._in_lock_step and any(self._processes.values())

    def _replay(self) -> None:
        """Replay all recorded episodes. Give them to the engine as if the run had not stopped: first those that were stopped
        within a turn, then those that waited for their environment."""
        self._requests = []
        while self._queue or any(self._processes.values()):
            self._admit()
            self._poll(1.0)
            if not self._blocked:
                self._take()
        for _, _, request in sorted(self._requests, key=lambda item: item[:2]):
            self.engine.add(request)
        self._requests = None

    def unfinished(self) -> list[Output]:
        """Return all unfinished responses so far, including those that the engine does not have."""
        elsewhere = {id: episode.final or episode.now.output for id, episode in self._of.items() if not episode.in_engine}
        return super().unfinished() + [output or nothing(id) for id, output in elsewhere.items()]

    def pause(self, below: Key) -> None:
        """Take all unfinished responses out of the engine. Their environments' answers wait."""
        super().pause(below)
        self.paused_below = below

    def resume(self) -> None:
        self.paused_below = Key(False, 0)
        super().resume()
        if self._has_recorded:
            self._has_recorded = False
            self._replay()

    def last_turn(self, output: Output) -> list[int]:
        return self._of[output.id].last

    def score(self, id: Id) -> Score | None:
        """Return an ended episode's score by its environment, 0 if it was cut before; None if a verifier has to score it."""
        episode = self._of[id]
        if episode.event or episode.rewards:
            return episode.event or Score(sum(episode.rewards))
        if can_score(self.working[id[0]].prompt.data_source, self.args.reward):
            return None
        if episode.cut:
            return Score(0.0)
        return Score(None, event="bad_value", message="neither the environment nor a verifier of its data_source scored it")

    def extra(self, id: Id) -> dict[str, float]:
        """Return further numbers of an ended episode; none if its prompt's images could not be prepared."""
        if id not in self._of:
            return {}
        episode = self._of[id]
        work = self.working[id[0]]
        sampled = int(work.added[id[1]].sampled(len(episode.final.token_ids)).sum())
        own = {}
        if name := self.environments.name_of(work.prompt.row):
            score = work.scores.get(id[1])
            own = {f"env/{name}/turns": episode.turns}
            own |= {} if score is None or score.score is None else {f"env/{name}/score": score.score}
        return own | {
            "turns": episode.turns,
            "tokens_per_turn": sampled / max(1, episode.turns),
            "tool_calls": episode.calls,
            "malformed_calls": episode.malformed,
            "cut_by_turns": float(episode.cut == "turns"),
            "cut_by_length": float(episode.cut == "length"),
            "environment_seconds": sum(answered for of in episode.histories for _, answered in of.seconds),
            "cached_tokens": episode.cached,
            "restarts": episode.restarts,
        }

    def drop(self, key: Key) -> None:
        for request in self.working[key].requests:
            del self._of[request.id]
        self._prompts.pop(key, None)
        super().drop(key)

    # -- the processes

    def _admit(self) -> None:
        """Start the environments of queued prompts. Episodes that are paused do not count towards the limit."""
        for key in [key for key in self._queue if key >= self.paused_below]:
            at_work = sum(key >= self.paused_below for key, _ in self._processes)
            if at_work >= BY_ROWS * self.args.engine.max_num_seqs and self._requests is None:
                return
            self._queue.remove(key)
            for request in self.working[key].requests:
                self._start_process(request.id)

    def _start_process(self, id: Id) -> None:
        key, number = id
        prompt = self.working[key].prompt
        known = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, "extra_info": prompt.extra_info}
        seeds = {
            "seed": request_seed(self.args.seed, key.place, OF_GROUP),
            "own_seed": request_seed(self.args.seed, key.place, number),
        }
        self._processes[id] = True
        if self.engine_ranks.is_leader:
            self.environments.begin(id, row=prompt.row | known, split="val" if key.validates else "train", **seeds)

    def _ask(self, id: Id, what: str, **item: Any) -> None:
        if id in self._processes:  # otherwise it has failed, and its event is in `_answers`
            self._processes[id] = True
            self._of[id].asked = self._now
            if self.engine_ranks.is_leader:
                self.environments.ask(id, what, **item)

    def _end_process(self, id: Id) -> None:
        self._processes.pop(id, None)
        if self.engine_ranks.is_leader:
            self.environments.end(id)

    def _poll(self, wait: float) -> None:
        """Read answers; wait up to `wait` seconds for one. Collective over the engine's ranks, if there is any process."""
        if not self._processes and not self._outages.waiting:
            return
        found = self.environments.poll(wait) if self.engine_ranks.is_leader else []
        answers, self._now = self.engine_ranks.agree((found, time.monotonic()))
        for (key, number), answer in answers:
            id = Key(*key), number
            self._answers.append((id, answer))
            if "event" in answer:
                self._processes.pop(id, None)
            elif id in self._processes:
                self._processes[id] = False

    def _take(self) -> None:
        """Act on the answers: in lock step by key, not in order of arrival."""
        answers = [item for item in self._answers if item[0][0] >= self.paused_below]
        self._answers = [item for item in self._answers if item[0][0] < self.paused_below]
        acts = {"reset": self._was_reset, "step": self._answered, "end": self._was_scored, "again": self._start_over}
        for id, answer in sorted(answers, key=lambda item: item[0]) if self._in_lock_step else answers:
            if id in self._of and not self._of[id].final:
                act = self._fail if "event" in answer else acts[answer["asked"]]
                act(id, answer)

    # -- the beginning

    def _was_reset(self, id: Id, answer: dict) -> None:
        """Start an episode. The first of a group sets the group's prompt; an answer without one adds nothing to the row's."""
        key = id[0]
        work = self.working[key]
        prompt = answer.get("prompt")
        said = prompt, answer.get("images")
        self._of[id].wants = answer
        self._resetting.discard(id)
        if not prompt and not work.prompt.ids:
            self._refuse(id, "the row has no prompt, and reset adds no message to it")
        elif key in self._prompts:
            self._begin(id, said)
        elif prompt and len(prompt) > self.args.data.max_prompt_length:
            self._refuse(id, f"the prompt has become {len(prompt)} tokens long, more than --max-prompt-length")
        elif prompt and work.prompt.images:
            self._refuse(id, "a prompt whose row has images cannot be added to")
        else:
            if prompt:
                files = files_of(answer)
                images = images_of(self.job, prompt, np.ones(len(prompt), bool), files) if files else None
                text = self.job.tokenizer.decode(self.job.prompts.prep.once(prompt) if files else prompt)
                work.prompt = dataclasses.replace(work.prompt, ids=prompt, text=text, images=images)
                work.brings_images = bool(files)
            self._prompts[key] = said
            self._begin(id, said)

    def _begin(self, id: Id, said: tuple) -> None:
        """Start an episode whose group has a prompt, which must be this episode's as well. said: its tokens and images, of the
        reset."""
        if said != self._prompts[id[0]]:
            self._refuse(id, "reset adds another prompt than in its group")
            return
        prompt = self.working[id[0]].prompt
        if self._of[id].known and self._of[id].prompt != named_of(prompt):
            self._start_over(id)
            return
        now = self._of[id].now
        now.request = dataclasses.replace(now.request, prompt_ids=prompt.ids)
        self._continue(id)

    def _images(self, id: Id, so_far: Output | None) -> "Images | None":
        """Return the images of the prompt and those that the environment has shown behind it."""
        episode = self._of[id]
        before = None if episode.active else self.working[id[0]].prompt.images
        added = episode.now.added
        if not added.images:
            return before
        prompt = episode.now.request.prompt_ids
        tokens = so_far.token_ids if so_far else []
        shown = np.concatenate([np.ones(len(prompt), bool), ~added.sampled(len(tokens))])
        return images_of(self.job, [*prompt, *tokens], shown, [*(before.sources if before else ()), *added.images])

    def _refuse(self, id: Id, wrong: str) -> None:
        self._fail(id, {"event": "bad_value", "message": wrong})

    # -- what is recorded

    def _episode(self, request: Request, output: Output | None, prompt: Named | None, restarts: int = 0) -> Episode:
        """Return a new episode. output, prompt: recorded ones."""
        key, number = request.id
        self._resetting.add(request.id)
        history = History(request, output, self.working[key].added[number])
        return Episode([history], prompt, len(output.token_ids) if output else 0, restarts=restarts)

    def _continue(self, id: Id) -> None:
        """Let the record give the next turn, or the engine. The record's last turn may be incomplete, because the run or the
        budget ended."""
        episode = self._of[id]
        now = episode.now
        if now.at >= episode.known:
            return self._add(id)
        episode.began = time.monotonic()  # nothing is sampled again
        tokens = now.output.token_ids
        end = now.end_of_run()
        stop = now.request.sampling.stop
        if end < len(tokens) or tokens[-1] in self.end_tokens or (stop and stop.complete(tokens, now.at)):
            self._ask(id, "step", ids=episode.say(end))
        elif now.output.finish_reason == "unfinished":
            self._add(id)
        else:
            self._cut(id)

    def _start_over(self, id: Id, answer: dict | None = None) -> None:
        """Begin an episode again that cannot be played as it was recorded."""
        self.working[id[0]].added.pop(id[1], None)
        self._of[id].now.output = None
        self._play_again(id)

    # -- turn after turn

    def _add(self, id: Id) -> None:
        """Let the engine sample the next turn, before turns of prompts that began later. If responses keep their KV cache
        across updates, turns keep it too."""
        key, number = id
        episode = self._of[id]
        now = episode.now
        episode.began = time.monotonic()
        episode.in_engine = True
        so_far = dataclasses.replace(now.output, finish_reason="unfinished") if now.output and now.output.token_ids else None
        now.output = None
        tokens = len(so_far.token_ids) if so_far else 0
        kept = so_far.versions[0] if so_far and getattr(self.args.schedule, "partial_rollout", "") == "keep" else None
        most = self._room(id)
        if (own := episode.wants.get("most")) is not None:
            most = min(most, tokens + own)
        stop = self._stop_of(tuple(episode.wants.get("stop", ())))
        limits = {"max_tokens": most, "schema": episode.wants.get("schema", ""), "stop": stop}
        request = dataclasses.replace(
            now.request,
            sampling=dataclasses.replace(now.request.sampling, **limits),
            so_far=so_far,
            turn=now.at,
            images=self._images(id, so_far),
            priority=key.place,
            kv_version=kept,
        )
        self.working[key].requests[number] = request
        if self._requests is None:
            self.engine.add(request)
        else:
            was_playing = 0 < episode.known == tokens
            self._requests.append((not was_playing, id, request))

    def _make_stop(self, strings: tuple[str, ...]) -> StopStrings | None:
        """Return the stop strings of a turn: those of --stop, and those of an agent's call."""
        strings = (*self.args.sampling.stop, *strings)
        return StopStrings(strings, self.job.tokenizer) if strings else None

    def _room(self, id: Id) -> int:
        """Return the most tokens that the response may have."""
        return self.working[id[0]].room

    def _turn_ended(self, output: Output) -> None:
        """Give a turn that the engine has finished to its environment, unless it is the last."""
        episode = self._of[output.id]
        episode.cached += output.cached if episode.turns else 0
        episode.now.output = output
        episode.in_engine = False
        if episode.event:
            self._finish(output.id, "stop")
        elif output.finish_reason == "length" and len(output.token_ids) >= self._room(output.id):
            self._cut(output.id)
        else:
            self._ask(output.id, "step", ids=episode.say(len(output.token_ids)))

    def _answered(self, id: Id, answer: dict) -> None:
        """Append the environment's answer, which is masked, and continue, or end the episode."""
        episode = self._of[id]
        now = episode.now
        ids = answer["ids"]
        files = files_of(answer)
        episode.add(answer)
        repeats = now.at < episode.known
        if repeats and not episode.is_recorded(answer, files):
            self._start_over(id)
        elif answer["done"]:
            self._finish(id, "stop")
            self._has_worked(id)
        elif episode.turns >= self.args.environment.max_turns or now.at + len(ids) >= self._room(id):
            self._end(id, "turns" if episode.turns >= self.args.environment.max_turns else "length")
        else:
            episode.wants = answer
            if ids and not repeats:
                now.added.mask = np.concatenate([now.added.sampled(now.at), np.zeros(len(ids), bool)])
                now.output = with_answer(now.output, ids)
            now.added.images += [] if repeats else files
            now.at += len(ids)
            self._continue(id)

    # -- the end

    def _cut(self, id: Id) -> None:
        """End an episode whose turn the budget has cut. Its environment does not get the turn."""
        self._of[id].say(len(self._of[id].now.output.token_ids))
        self._end(id, "length")

    def _end(self, id: Id, cut: str) -> None:
        """End an episode that its environment has not ended. The environment may still have a reward for it."""
        episode = self._of[id]
        episode.cut = cut
        name = self.environments.name_of(self.working[id[0]].prompt.row)
        if self.environments.scores_at_end[name] and not episode.rewards:
            self._ask(id, "end", ids=episode.now.output.token_ids)
        else:
            self._finish(id, "length")

    def _was_scored(self, id: Id, answer: dict) -> None:
        self._of[id].add(answer)
        self._finish(id, "length")
        self._has_worked(id)

    def _finish(self, id: Id, reason: str) -> None:
        work = self.working[id[0]]
        self._end_process(id)
        whole = self._whole(id)
        work.added[id[1]] = whole.added
        work.seconds[id[1]] = [[round(its, 3) for its in of_turn] for of_turn in whole.seconds]
        self._of[id].final = dataclasses.replace(whole.output, finish_reason=reason)
        self._ended.append(self._of[id].final)

    def _whole(self, id: Id) -> History:
        """Return an ended episode as one history."""
        return self._of[id].now

    def _fail(self, id: Id, answer: dict) -> None:
        """End an episode whose environment has failed. Only this response is lost. One that has not begun may try once more."""
        episode = self._of[id]
        self._end_process(id)
        if id in self._resetting and not episode.restarts and answer["event"] != "bad_value":
            self._play_again(id)
            return
        failed = Score(None, event=answer["event"], message=answer["message"])
        if episode.in_engine:  # the turn under way is the last
            episode.event = failed
            return
        self._resetting.discard(id)
        self._lose(self._outages.take(self.working[id[0]].prompt.data_source, id, failed))

    def _lose(self, failed: list[tuple[Id, Score]]) -> None:
        """End episodes that cannot be scored."""
        for id, score in failed:
            episode = self._of[id]
            episode.event = score
            episode.now.output = episode.now.output or nothing(id)
            self._finish(id, "stop")

    # -- outages of environments

    def _has_worked(self, id: Id) -> None:
        """Count an episode that its environment has played to its end: those that failed before are lost, or played again."""
        *failed, _ = self._outages.take(self.working[id[0]].prompt.data_source, id, Score(0.0), self._of[id].asked)
        self._lose(failed)

    def _play_again(self, id: Id) -> None:
        """Reset the environment of an episode, and play its turns again."""
        before = self._of[id]
        self._end_process(id)
        prompt = before.prompt or named_of(self.working[id[0]].prompt)
        self._of[id] = self._episode(before.histories[0].request, before.now.output, prompt, before.restarts + 1)
        self._start_process(id)

"""Scores for responses: the pool that runs the built-in verifiers (rl/rewards/verifiers.py) or the user's own function.

They run in separate processes, so that a response that cannot be scored (the function hangs, raises, returns no finite number,
uses too much memory or dies) is counted as an event and never stops the run: the response is left out of training
(--on-reward-error). rl/rewards/lane.py serves these processes, which run rl/rewards/worker.py and exchange JSON.
"""

import contextlib
import json
import threading
from collections import Counter
from queue import Empty
from typing import Any

from rl.errors import UserError
from rl.rewards.args import RewardArgs
from rl.rewards.environment import check_passed
from rl.rewards.lane import Lane, Lanes
from rl.rewards.score import Score, as_score, plain
from rl.rewards.verifiers import BUILT_IN, HARMLESS, code, verifier_name


def can_score(source: str, args: RewardArgs) -> bool:
    """Return whether responses to prompts of this data_source can be scored."""
    return bool(args.own_reward) or verifier_name(source, args.reward) is not None


def check_sources(sources: dict[str, str], args: RewardArgs) -> None:
    """Raise UserError for a data_source without a verifier (--reward serves all), and for programs if the sandbox is missing or
    not secure. sources: data_source -> its first place in the data."""
    for source, where in sources.items():
        if not can_score(source, args):
            raise UserError(
                f"{where}: there is no built-in reward for data_source {source!r}. Give your own with --reward "
                f"file.py:function, or use one of: {', '.join(BUILT_IN)}."
            )
    if not args.own_reward and any(BUILT_IN[verifier_name(source, args.reward)] is code for source in sources):
        from rl.rewards.programs import sandbox  # late: only programs need it

        sandbox.check()


class ScoringPool(Lanes, contextlib.AbstractContextManager):
    """Background scoring of (key, response) items: `submit` never blocks; `poll` and `wait` return finished scores.

    Each scoring process has a thread (rl/rewards/lane.py). The first process imports a user's function right away, so that a
    file that cannot be imported is a UserError at the start. The processes end when the pool is closed or Python ends.
    """

    def __init__(self, args: RewardArgs):
        super().__init__(args)
        self.events: Counter[str] = Counter()
        self.last_message: dict[str, str] = {}  # by kind of event
        self.pending = 0  # responses whose score has not been returned
        self._lanes: list[threading.Thread] = []
        if args.own_reward and not args.scores_environments:
            check_passed(args.reward_env)
            self._start_lane()
            self.begun.wait()
            self._raise_failure()

    def submit(
        self, key: Any, data_source: str, text: str, ground_truth: Any, extra_info: dict | None = None, prompt: Any = None
    ) -> None:
        """Queue a response for scoring. prompt: messages or text, for the judge."""
        self._raise_failure()
        more = {"prompt": prompt} if self.args.judge else {}
        if not self.args.own_reward:
            check_sources({data_source: f"response {key}"}, self.args)
            data_source = verifier_name(data_source, self.args.reward)  # the worker looks it up in BUILT_IN
            function = BUILT_IN[data_source]
            if function in HARMLESS:
                return self.hand_back(key, as_score(function(data_source, text, ground_truth)))
            more = {"limits": self.args.limits(self.args.reward_timeout)} if function is code else {}
        response = {"data_source": data_source, "solution_str": text, "ground_truth": ground_truth, "extra_info": extra_info}
        self.queue.put((key, json.dumps(response | more, default=plain)))
        self.pending += 1
        if len(self._lanes) < min(self.args.reward_workers, self.pending):
            self._start_lane()

    def hand_back(self, key: Any, score: Score) -> None:
        """Accept a score computed elsewhere; `poll` returns it with the others."""
        self.finish(key, score)
        self.pending += 1

    def poll(self) -> list[tuple[Any, Score]]:
        """Return the responses scored since the last call, as (key, score)."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> list[tuple[Any, Score]]:
        """Return what `poll` returns, but wait up to `timeout` seconds for a first score."""
        self._raise_failure()
        done: list[tuple[Any, Score]] = []
        with contextlib.suppress(Empty):
            while len(done) < self.pending:
                key, score = self.done.get(timeout=0.0 if done else timeout)
                self._raise_failure()
                done.append((key, score))
                if score.event:
                    self.events[score.event] += 1
                    self.last_message[score.event] = score.message
        self.pending -= len(done)
        return done

    def close(self) -> None:
        """End the scoring processes, and all processes that they have started."""
        self.closed = True
        for _ in self._lanes:
            self.queue.put(None)
        for thread in self._lanes:
            thread.join()

    def __exit__(self, *_) -> None:
        self.close()

    def _start_lane(self) -> None:
        thread = threading.Thread(target=Lane(self).run, name="scoring", daemon=True)
        self._lanes.append(thread)
        thread.start()

    def _raise_failure(self) -> None:
        if self.failure:
            raise self.failure

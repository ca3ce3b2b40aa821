"""Scores for responses: the pool that runs the built-in verifiers (rl/rewards/verifiers.py) or the user's own function.

They run in separate processes, so that a response that cannot be scored (the function hangs, raises, returns no finite number,
uses too much memory or dies) is counted as an event and never stops the run: the response is left out of training
(--on-reward-error). The threads that serve these processes are in rl/rewards/threads.py, the program that runs in them is
rl/rewards/worker.py. They exchange JSON; nothing is pickled.
"""

import contextlib
import json
import weakref
from collections import Counter
from collections.abc import Mapping
from queue import Empty
from typing import Any

import torch

from rl.errors import UserError
from rl.ranks import dist
from rl.rewards.args import RewardArgs
from rl.rewards.environment import check_passed
from rl.rewards.score import EVENTS, Score, plain
from rl.rewards.threads import Threads
from rl.rewards.verifiers import BUILT_IN, HARMLESS, code, gsm8k, verifier_name


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


class ScoringPool(contextlib.AbstractContextManager):
    """Background scoring of (key, response) items: `submit` never blocks; `poll` and `wait` return finished scores.

    Each scoring process has a thread, which gives it responses and replaces it when it is lost. This class counts events, and
    raises the error of a thread that fails. The first process imports a user's function right away, so that a file that cannot
    be imported is a UserError at the start. The processes end when the pool is closed or garbage collected, or when Python
    ends.
    """

    def __init__(self, args: RewardArgs):
        self.args = args
        self.events: Counter[str] = Counter()
        self.last_message: dict[str, str] = {}  # by kind of event
        self.pending = 0  # responses whose score has not been returned
        self._threads = Threads(args)
        self._finalizer = weakref.finalize(self, self._threads.close)
        if args.own_reward:
            check_passed(args.reward_env)
            try:
                self._threads.start_one()
                self._threads.begun.wait()
                self._threads.raise_failure()
            except BaseException:
                self.close()
                raise

    def submit(
        self, key: Any, data_source: str, text: str, ground_truth: Any, extra_info: dict | None = None, prompt: Any = None
    ) -> None:
        """Queue a response for scoring. prompt: messages or text, for the judge."""
        self._threads.raise_failure()
        more = {"prompt": prompt} if self.args.judge else {}
        if not self.args.own_reward:
            check_sources({data_source: f"response {key}"}, self.args)
            data_source = verifier_name(data_source, self.args.reward)  # the worker looks it up in BUILT_IN
            function = BUILT_IN[data_source]
            if function is gsm8k and self.args.format_score:
                value = gsm8k(data_source, text, ground_truth, format_score=self.args.format_score)
                return self.hand_back(key, Score(value, {"acc": float(value == 1)}))
            if function in HARMLESS:
                return self.hand_back(key, Score(function(data_source, text, ground_truth)))
            more = {"limits": self.args.limits(self.args.reward_timeout)} if function is code else {}
        response = {"data_source": data_source, "solution_str": text, "ground_truth": ground_truth, "extra_info": extra_info}
        self._threads.queue.put((key, json.dumps(response | more, default=plain)))
        self.pending += 1
        if len(self._threads) < min(self.args.reward_workers, self.pending):
            self._threads.start_one()

    def hand_back(self, key: Any, score: Score) -> None:
        """Accept a score computed elsewhere; `poll` returns it with the others."""
        self._threads.hand_back(key, score)
        self.pending += 1

    def poll(self) -> list[tuple[Any, Score]]:
        """Return the responses scored since the last call, as (key, score)."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> list[tuple[Any, Score]]:
        """Return what `poll` returns, but wait up to `timeout` seconds for a first score."""
        self._threads.raise_failure()
        done: list[tuple[Any, Score]] = []
        with contextlib.suppress(Empty):
            while len(done) < self.pending:
                key, score = self._threads.done.get(timeout=0.0 if done else timeout)
                self._threads.raise_failure()
                done.append((key, score))
                if score.event:
                    self.events[score.event] += 1
                    self.last_message[score.event] = score.message
        self.pending -= len(done)
        return done

    def close(self) -> None:
        """End the scoring processes, and all processes that they have started."""
        self._threads.close()
        self._finalizer.detach()

    def __exit__(self, *_) -> None:
        self.close()


def event_metrics(events: Mapping[str, int]) -> dict[str, int]:
    """Return the counts as metrics reward/events/<kind>."""
    return {f"reward/events/{kind}": events.get(kind, 0) for kind in EVENTS}


class ScoringEvents:
    """The number of responses that could not be scored so far, by kind, over all ranks that score."""

    def __init__(self, pool: ScoringPool, ranks: dist.Ranks):
        self._pool, self._ranks = pool, ranks

    def state(self) -> dict[str, int]:
        """Return the counts. A collective."""
        counts = dist.all_reduce_sum(torch.tensor([float(self._pool.events[kind]) for kind in EVENTS]))
        return {kind: int(count) for kind, count in zip(EVENTS, counts, strict=True)}

    def restore(self, state: dict[str, int]) -> None:
        self._pool.events.update(state if self._ranks.is_main else {})

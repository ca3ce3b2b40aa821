"""The pool that scores responses, with the built-in verifiers (rl/rewards/score.py) or the user's own function.

All but harmless verifiers run in separate processes, so that a response that cannot be scored (the function hangs, raises,
returns no finite number, uses too much memory or ends its process) is counted as an event and never stops the run: the
response is left out of training.
"""

import contextlib
from collections import Counter
from typing import Any

from rl.errors import UserError
from rl.rewards.args import CODE, RewardArgs
from rl.rewards.score import BUILT_IN, HARMLESS, Score, as_score, grade, verifier_name


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
    if not args.own_reward and any(BUILT_IN[verifier_name(source, args.reward)] == CODE for source in sources):
        from program_grader import sandbox  # late: only programs need it

        try:
            sandbox.check()
        except sandbox.NoSandbox as error:
            raise UserError(str(error)) from None


class ScoringPool(contextlib.AbstractContextManager):
    """Background scoring of (key, response) items: `submit` never blocks; `wait` returns finished scores.

    Harmless graders score at once. All others run in processes (rl/rewards/scorers.py), a user's function from the start, so
    that a file that cannot be imported is a UserError then.
    """

    def __init__(self, args: RewardArgs):
        self.args = args
        self.events: Counter[str] = Counter()
        self.last_message: dict[str, str] = {}  # by kind of event
        self.tape: Any = None  # with --record-env or --from-tape: user_processes.tape.Tape
        self._done: list[tuple[Any, Score]] = []  # scored here
        self._scorers: Any = None
        if args.own_reward and not args.scores_environments:
            self._start()

    @property
    def pending(self) -> int:
        """The number of responses whose score has not been returned."""
        return len(self._done) + (self._scorers.pending if self._scorers else 0)

    def submit(
        self, key: Any, data_source: str, text: str, ground_truth: Any, extra_info: dict | None = None, **further: Any
    ) -> None:
        """Queue a response for scoring. further: `prompt` (messages or text), `step`, `split`, for functions that name them."""
        item = {"data_source": data_source, "solution_str": text, "ground_truth": ground_truth, "extra_info": extra_info}
        if self.args.own_reward:
            item |= {name: further.get(name) for name in self._scorers.takes}
        else:
            check_sources({data_source: f"response {key}"}, self.args)
            item["data_source"] = name = verifier_name(data_source, self.args.reward)
            if BUILT_IN[name] in HARMLESS:
                return self.hand_back(key, as_score(grade(**item)))
            item |= {"seconds_in_all": self.args.reward_timeout} if BUILT_IN[name] == CODE else {}
        if self.tape and (reply := self.tape.score(key, item)):
            from rl.rewards.scorers import score_of

            return self.hand_back(key, score_of(reply, item, self.args))
        if not self._scorers:
            self._start()
        self._scorers.submit(key, item)

    def hand_back(self, key: Any, score: Score) -> None:
        """Accept a score computed elsewhere; `wait` returns it with the others."""
        self._done.append((key, score))

    def wait(self, timeout: float = 0.0) -> list[tuple[Any, Score]]:
        """Return the responses scored since the last call, as (key, score). Wait up to `timeout` seconds for a first one."""
        done, self._done = self._done, []
        if self._scorers:
            done += self._scorers.wait(0.0 if done else timeout, self.tape)
        for _, score in done:
            if score.event:
                self.events[score.event] += 1
                self.last_message[score.event] = score.message
        return done

    def close(self) -> None:
        """End the processes. Responses under way get no score."""
        if self._scorers:
            self._scorers.close()

    def __exit__(self, *_) -> None:
        self.close()

    def _start(self) -> None:
        from rl.rewards.scorers import Scorers  # late: harmless graders need no process

        self._scorers = Scorers(self.args)

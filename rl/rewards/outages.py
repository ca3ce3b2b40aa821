"""Outages of a grader or an environment: responses wait until it works again, instead of losing their scores.

If a grader fails on FAILURES responses of a data_source in a row, or on the last ones under way, then the last response that it
scored is scored again. If that fails too, the grader is out: a judge does not answer, a disk is full. The responses wait, and
that one is scored again after 1, 2, 4, ... up to 60 seconds; once it has a score, so are the others. After --outage-timeout
they have none, for the event OUT: the run ends before it trains them. A grader that has never worked is not out but wrong.

An environment cannot repeat an episode that is over: it is out if FAILURES episodes in a row fail, and one of these is played
again. At the end they keep their own events.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl.ranks import watchdog
from rl.rewards.score import OUT

FAILURES = 16  # in a row
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds


class LastScored(NamedTuple):
    """The key of the newest response of a data_source that has a score."""

    source: str


@dataclass
class _Source:
    """How the responses of a data_source fare."""

    has_worked: bool | None = None  # None: never; False: not since an outage that was too long
    failures: int = 0  # in a row
    failed: dict = field(default_factory=dict)  # key of a response that waits -> (its score, which says what happened; when)
    since: float | None = None  # when the outage began; None: there is none
    pause: float = 0.0
    next: float = 0.0  # when to score a response again
    asked: Any = None  # the response that shows whether the grader works, while it is being scored again
    again: set = field(default_factory=set)  # responses that are scored again, after FAILURES that were no outage


class Outages:
    """The responses that could not be scored and still may be."""

    def __init__(
        self,
        seconds: float,
        grader: str,
        again: Callable[[Any], None],
        clock: Callable[[], float] = time.monotonic,
        says: bool = True,
        repeats: bool = True,
    ):
        """seconds: --outage-timeout; grader: its name; again: scores the response with this key again; says: whether to tell
        the user; repeats: whether `again` takes LastScored."""
        self._seconds = min(seconds, watchdog.limit * 2 / 3)  # other ranks wait for this one, without progress
        self._grader, self._again, self._clock, self._says, self._repeats = grader, again, clock, says, repeats
        self._sources: dict[str, _Source] = {}

    @property
    def is_one(self) -> bool:
        """Whether there is an outage, or a response is being scored to find out."""
        return any(source.since is not None or source.asked is not None for source in self._sources.values())

    @property
    def waiting(self) -> int:
        """The number of responses that wait for a score."""
        return sum(len(source.failed) for source in self._sources.values())

    def take(self, name: str, key, score, asked: float | None = None) -> list[tuple]:
        """Take the score of a response of this data_source. Return those that are final, as (key, score). asked: when the score
        was asked for; one that was asked for before others failed does not show that those fail alone. None: now."""
        source = self._sources.setdefault(name, _Source())
        is_new = key != LastScored(name)
        was_asked = source.asked is not None and key == source.asked
        if was_asked:
            source.asked = None
        if not score.event:
            source.again.discard(key)
            final = self._worked(name, source, self._clock() if asked is None else asked)
            return [*final, (key, score)] if is_new else final
        if not source.has_worked or not (self._repeats or self._seconds):  # agents play nothing again
            return [(key, score if source.has_worked is None else self._out(score))] if is_new else []
        if is_new:
            source.failures += 1
            source.failed[key] = (score, self._clock())
        if was_asked:
            self._fails_again(name, source, score)
        elif self._repeats and source.failures >= FAILURES:
            self._find_out(name, source)
        elif source.failures >= FAILURES and source.since is None:
            self._fails_again(name, source, score)
        return []

    def look(self, nothing_comes: bool) -> list[tuple]:
        """Score responses again whose time has come. Return those that remain without a score: the outage is too long, or there
        is none and nothing else comes."""
        final = []
        for name, source in self._sources.items():
            if source.since is None:
                if nothing_comes and source.failed and self._repeats:
                    self._find_out(name, source)
                elif nothing_comes:
                    final += self._give_up(source)
                continue
            watchdog.progress()
            if self._clock() - source.since >= self._seconds:
                self._say(f"responses of {name} could not be scored for {self._seconds:g} s: they remain without a score.")
                source.has_worked = False
                final += [(key, self._out(score)) for key, score in self._give_up(source)]
            elif source.asked is None and self._clock() >= source.next:
                source.asked = LastScored(name) if self._repeats else next(iter(source.failed))
                source.failed.pop(source.asked, None)
                self._again(source.asked)
        return final

    def _find_out(self, name: str, source: _Source) -> None:
        """Score a response again that had a score, unless that is under way or the grader is known to be out."""
        if source.since is None and source.asked is None:
            source.asked = LastScored(name)
            self._again(source.asked)

    def _fails_again(self, name: str, source: _Source, score) -> None:
        """Begin an outage, or lengthen the pause of the one that there is."""
        now = self._clock()
        source.pause = FIRST_PAUSE if source.since is None else min(2 * source.pause, LONGEST_PAUSE)
        source.next = now + source.pause
        if source.since is None:
            source.since = now
            self._say(
                f"{source.failures} responses of {name} in a row could not be scored ({score.error}). They wait for up to "
                f"{self._seconds:g} s (--outage-timeout), and are scored again in growing pauses."
            )

    def _worked(self, name: str, source: _Source, asked: float) -> list[tuple]:
        """A response has a score. Return those that failed before it; after an outage they are scored again instead, and once
        after FAILURES."""
        source.has_worked = True
        if source.since is not None:
            if asked < source.since:
                return []
            self._say(f"responses of {name} are scored again, after {self._clock() - source.since:.0f} s.", "note")
            source.again.clear()
            asked = math.inf
        final = []
        many = source.since is not None or source.failures >= FAILURES
        for key, score in self._give_up(source, asked):
            if many and key not in source.again:
                source.again.add(key)
                self._again(key)
            else:
                source.again.discard(key)
                final.append((key, score))
        source.failures = len(source.failed)
        return final

    def _give_up(self, source: _Source, before: float = math.inf) -> list[tuple]:
        """Return the responses that failed by then."""
        final = [(key, score) for key, (score, when) in source.failed.items() if when <= before]
        for key, _ in final:
            del source.failed[key]
        source.since = source.asked = None  # one that is under way comes back
        return final

    def _out(self, score):
        """Return the score of a response that an outage has left without one."""
        return dataclasses.replace(score, event=OUT, message=score.error) if self._repeats else score

    def _say(self, text: str, kind: str = "warning") -> None:
        if self._says:
            print(f"{kind}: {self._grader}: {text}", file=sys.stderr, flush=True)

"""Outages of a grader or an environment: responses wait until it works again, instead of losing their scores.

If a function has scored responses of a data_source, and then fails on FAILURES of them in a row, it is out: a judge does not
answer, a disk is full. Its responses wait. One of them is scored again after 1, 2, 4, ... up to 60 seconds; once a response
has a score, all the others are scored again as well. After --outage-timeout they remain without one. A function that has never
worked is not out but wrong.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rl.ranks import watchdog

FAILURES = 16  # in a row; fewer may all belong to one prompt
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds


@dataclass
class _Source:
    """How the responses of a data_source fare."""

    has_worked: bool = False  # since the last outage that did not end
    failures: int = 0  # in a row
    failed: dict = field(default_factory=dict)  # key of a response that waits -> (its score, which says what happened; when)
    since: float | None = None  # when the outage began; None: there is none
    pause: float = 0.0
    next: float = 0.0  # when to score a response again
    asked: Any = None  # the response that is being scored again


class Outages:
    """The responses that could not be scored and still may be."""

    def __init__(
        self,
        seconds: float,
        grader: str,
        again: Callable[[Any], None],
        clock: Callable[[], float] = time.monotonic,
        says: bool = True,
    ):
        """seconds: --outage-timeout; grader: its name; again: scores the response with this key again; says: whether to tell
        the user."""
        self._seconds = min(seconds, watchdog.limit * 2 / 3)  # other ranks wait for this one, without progress
        self._grader, self._again, self._clock, self._says = grader, again, clock, says
        self._sources: dict[str, _Source] = {}

    @property
    def is_one(self) -> bool:
        return any(source.since is not None for source in self._sources.values())

    @property
    def waiting(self) -> int:
        """The number of responses that wait for a score."""
        return sum(len(source.failed) for source in self._sources.values())

    def take(self, name: str, key, score, asked: float | None = None) -> list[tuple]:
        """Take the score of a response of this data_source. Return those that are final, as (key, score). asked: when the score
        was asked for; one that was asked for before others failed does not show that those fail alone. None: now."""
        source = self._sources.setdefault(name, _Source())
        if not score.event:
            return [*self._worked(name, source, self._clock() if asked is None else asked), (key, score)]
        source.failures += 1
        if not source.has_worked or not self._seconds:
            return [(key, score)]
        source.failed[key] = (score, self._clock())
        if source.since is not None:
            if key == source.asked:
                source.pause = min(2 * source.pause, LONGEST_PAUSE)
                source.next = self._clock() + source.pause
                source.asked = None
        elif source.failures >= FAILURES:
            source.since = self._clock()
            source.pause = FIRST_PAUSE
            source.next = source.since + source.pause
            self._say(
                f"{source.failures} responses of {name} in a row could not be scored ({score.error}). They wait for up to "
                f"{self._seconds:g} s (--outage-timeout), and are scored again in growing pauses."
            )
        return []

    def look(self, nothing_comes: bool) -> list[tuple]:
        """Score responses again whose time has come. Return those that remain without a score: the outage is too long, or there
        is none and nothing else comes."""
        final = []
        for name, source in self._sources.items():
            if source.since is None:
                if nothing_comes:
                    final += self._give_up(source)
                continue
            watchdog.progress()
            if self._clock() - source.since > self._seconds:
                self._say(f"responses of {name} could not be scored for {self._seconds:g} s: they remain without a score.")
                source.has_worked = False
                final += self._give_up(source)
            elif source.asked is None and self._clock() >= source.next:
                source.asked = next(iter(source.failed))
                del source.failed[source.asked]
                self._again(source.asked)
        return final

    def _worked(self, name: str, source: _Source, asked: float) -> list[tuple]:
        """A response has a score. Return those that failed before it; after an outage they are scored again instead."""
        source.has_worked = True
        if source.since is None:
            final = self._give_up(source, asked)
            source.failures = len(source.failed)
            return final
        if asked < source.since:
            return []
        source.failures = 0
        self._say(f"responses of {name} are scored again, after {self._clock() - source.since:.0f} s.", "note")
        for key, _ in self._give_up(source):
            self._again(key)
        return []

    def _give_up(self, source: _Source, before: float = math.inf) -> list[tuple]:
        """Return the responses that failed by then."""
        final = [(key, score) for key, (score, when) in source.failed.items() if when <= before]
        for key, _ in final:
            del source.failed[key]
        source.since = source.asked = None  # one that is under way comes back
        return final

    def _say(self, text: str, kind: str = "warning") -> None:
        if self._says:
            print(f"{kind}: {self._grader}: {text}", file=sys.stderr, flush=True)

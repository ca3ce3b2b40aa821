"""--prompt-sampling, which skips prompts that were solved or hopeless when they were last trained, with a probability.

A prompt whose responses all get the same score teaches nothing, and its earlier groups predict this before new ones are
generated (GRESO, arXiv 2506.02177). The decision on a ticket depends on the groups trained up to the version of the weights
under which it may start, and on the ticket's random number, so that it is the same on every rank and after a resume. A skipped
ticket never starts; another may start in its place, as for a dropped one.

If batches are made whole, the generators keep the history, which covers all earlier batches. In a stream the learners keep it:
they decide on a ticket when the bound of staleness first lets it start, and announce the skipped tickets with the weights.
"""

import copy
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from rl.data.prompts import PromptOrder
from rl.samples.buffer import SampleBuffer
from rl.samples.group import Group
from rl.samples.schedule import AsyncSchedule

KINDS = EASY, HARD = "easy", "hard"  # all right, all wrong
MIXED = "mixed"
FIRST, LEAST, MOST, MOVE = 0.5, 0.05, 0.95, 0.01  # GRESO's chances: the first, their bounds, and the size of a change
TARGET = {EASY: 0.25 / 3, HARD: 0.25 * 2 / 3}  # GRESO's target fractions of such groups among all generated ones
FLOOR = 0.01  # the least chance of a prompt: GRESO's tend to 0, so that no step would end once the data set is solved

Shown = tuple[int, str]  # a ticket, and the kind of its group: one of KINDS, or MIXED


def shown(groups: Iterable[Group], rewards: Sequence[str] = ()) -> list[Shown]:
    """Return the kinds of the groups. A response is right if its acc, or its score if the reward function returns no acc, is
    above 0. A group that compares fewer than two responses has no kind. rewards: as in `Group.differs`."""
    out = []
    for group in groups:
        if len(group.compared) > 1:
            response = group.compared[0]
            score = response.extra.get("acc", response.reward("score"))
            flat = EASY if score > 0 else HARD
            out.append((group.ticket, MIXED if group.differs(rewards) else flat))
    return out


class PromptHistory:
    """The kinds that prompts have shown so far."""

    def __init__(self, args, order: PromptOrder):
        """args: a script's flags."""
        self.sampling = args.prompt_sampling
        self.seed = args.seed
        self.order = order
        self.shown = partial(shown, rewards=args.compared_rewards)
        self.flat: dict[int, list] = {}  # by prompt: the kind of its latest groups, and how many in a row had it
        self.chance = dict.fromkeys(KINDS, FIRST)  # that a prompt with one such group is taken
        self._noted: list[Shown] = []  # for the batch that is being generated
        self._skipped: list[int] = []  # tickets skipped since the last `take_skipped`

    def passes_over(self, ticket: int) -> bool:
        kind, times = self.flat.get(self.order(ticket)[1], (MIXED, 0))
        if not times or (self.sampling == "skip-solved" and kind == HARD):
            return False
        chance = LEAST if self.sampling == "skip-solved" else max(FLOOR, self.chance[kind] ** times)
        return random.Random(f"{self.seed}/prompt/{ticket}").random() >= chance

    def observe(self, shown: Iterable[Shown]) -> None:
        """Update the history with the kinds of a step's groups."""
        counts = Counter()
        for ticket, kind in sorted(shown):
            prompt = self.order(ticket)[1]
            before, times = self.flat.pop(prompt, (kind, 0))
            if kind != MIXED:
                self.flat[prompt] = [kind, times + 1 if kind == before else 1]
            counts[kind] += 1
        for kind in KINDS if counts else ():
            move = -MOVE if counts[kind] / counts.total() >= TARGET[kind] else MOVE
            self.chance[kind] = min(MOST, max(LEAST, round(self.chance[kind] + move, 2)))

    # -- for whole batches

    def take(self, first: int, count: int) -> tuple[list[int], int]:
        """Return the next `count` tickets from `first` on that are not skipped, and the ticket after the last of them."""
        taken = []
        ticket = first
        while len(taken) < count:
            (self._skipped if self.passes_over(ticket) else taken).append(ticket)
            ticket += 1
        return taken, ticket

    def note(self, groups: Iterable[Group]) -> None:
        """Note the kinds of all groups of a batch, for `commit`; they replace those noted before."""
        self._noted = self.shown(groups)

    def commit(self) -> list[Shown]:
        """Observe the noted batch, since it will be trained. Return its kinds, for `observe` on other ranks."""
        noted = self._noted
        self._noted = []
        self.observe(noted)
        return noted

    def take_skipped(self) -> list[int]:
        skipped = self._skipped
        self._skipped = []
        return skipped

    @staticmethod
    def apart(passed: Sequence[int], skipped: Sequence[int]) -> dict[str, list[int]]:
        """Return the tickets that a batch has passed by, by reason: the skipped ones, and the others, which were filtered."""
        return {"filtered": sorted({*passed} - {*skipped}), "skipped": [*skipped]}

    # -- the record, and a checkpoint's part

    def metrics(self) -> dict[str, float]:
        """Return prompts/*: the number of prompts of each kind, and GRESO's chances."""
        kinds = Counter(kind for kind, _ in self.flat.values())
        out = {f"prompts/{kind}": kinds[kind] for kind in KINDS}
        return out | ({f"prompts/chance_{kind}": self.chance[kind] for kind in KINDS} if self.sampling == "greso" else {})

    def state(self) -> dict:
        return {"flat": {str(prompt): of for prompt, of in self.flat.items()}, "chance": dict(self.chance)}

    def restore(self, state: Mapping) -> None:
        self.flat = {int(prompt): list(of) for prompt, of in state["flat"].items()}
        self.chance = dict(state["chance"])

    def after(self, batches: Iterable[Iterable[Shown]]) -> dict:
        """Return the state after further batches, of which the kinds are given."""
        later = copy.copy(self)
        later.restore(self.state())
        for shown in batches:
            later.observe(shown)
        return later.state()


class StreamHistory:
    """The history of a stream, the same on every learner. It decides which of the tickets that may start do so."""

    def __init__(self, schedule: AsyncSchedule, history: PromptHistory, buffer: SampleBuffer, total: int):
        """total: number of tickets that the whole run will train."""
        self.schedule, self.history, self.buffer, self.total = schedule, history, buffer, total
        self._news: list[Shown] = []  # kinds seen since the newest version was published
        self._version = -1  # the last version in the history
        self._decided = 0  # all tickets below have been decided on
        self.skipped: list[int] = []  # the skipped ones among them, from the buffer's `low` on
        buffer.observe = lambda group: self._news.extend(history.shown([group]))

    def published(self, version: int) -> None:
        """Decide on the tickets that this version lets start. To be called before it is announced."""
        if version > self._version:  # a resumed run announces its version again
            self.history.observe(self._news)
            self._news = []
            self._version = version
        self.extend()

    def extend(self) -> None:
        """Decide on the tickets that may now start under the newest version."""
        while self._decided < min(self.schedule.quota(self._version), self.total) + self.buffer.replaced:
            if self.history.passes_over(self._decided):
                self.buffer.skip(self._decided)
                self.skipped.append(self._decided)
            self._decided += 1
        self.skipped = [ticket for ticket in self.skipped if ticket >= self.buffer.low]

    def state(self) -> dict:
        own = {name: getattr(self, name) for name in ("_news", "_version", "_decided", "skipped")}
        return own | {"history": self.history.state()}

    def restore(self, state: dict) -> None:
        self.history.restore(state["history"])
        for name in ("_news", "_version", "_decided", "skipped"):
            setattr(self, name, state[name])
        self._news = [tuple(of) for of in self._news]

"""The schedules: the prompts of a step, and how far generation may run ahead of training.

A script's Args have one as `schedule`, and everything that depends on the order of generating, training and publishing is asked
of it. `AsyncSchedule` decides when a ticket may start.

A ticket is a place in the endless prompt order, drawn from one counter in torchrun's store. The k-th ticket (k from 0) may
start under the weights of version v only if

    k - dropped < (v + 1 + staleness_threshold) * prompts_per_publish

where a publish comes after every publish_every steps (AReaL, arXiv 2505.24298, eq. 3; verl's fully async flags). Threshold 0 is
on-policy if every step publishes, 1 is one step off. Left out: drawing tickets (rl/samples/tickets.py), and which groups are
trained next (rl/samples/buffer.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rl.errors import UserError
from rl.flag_words import DEFAULT_BATCH
from rl.parts import Part
from rl.ranges import Range
from rl.samples.group import Group
from rl.split import SplitArgs


class NextTicket:
    """The first ticket that no batch has taken, for batches that are made whole, one after the other."""

    def __init__(self):
        self.ticket = 0
        self.under_way: list[int] = []  # tickets before it that are still under way

    def begin(self, count: int) -> range:
        """Start `count` tickets, which are under way from now on; return them."""
        started = range(self.ticket, self.ticket + count)
        self.ticket = started.stop
        self.under_way = [*self.under_way, *started]
        return started

    def advance(self, ticket: int, groups: list[Group], under_way: Sequence[int] = ()) -> list[int]:
        """Continue with `ticket`. Return the tickets passed since the last call that are neither in the batch nor under way."""
        passed = {*range(self.ticket, ticket), *self.under_way}
        self.ticket = ticket
        self.under_way = [*under_way]
        return sorted(passed - {group.ticket for group in groups} - {*under_way})

    def state(self) -> dict:
        return {"ticket": self.ticket, "under_way": self.under_way}

    def restore(self, state: dict) -> None:
        self.ticket, self.under_way = state["ticket"], state["under_way"]


@dataclass(frozen=True)
class Schedule(Part, ABC):
    """What every part of a run may ask of its schedule."""

    _field = "schedule"

    split: ClassVar[SplitArgs | None] = None  # None if every rank generates and learns in turn
    publish_every: ClassVar[int] = 1  # steps

    @property
    @abstractmethod
    def prompts_per_step(self) -> int: ...

    @property
    @abstractmethod
    def prompts_per_update(self) -> int: ...

    @property
    @abstractmethod
    def trains_stale(self) -> bool:
        """Whether responses may come from weights older than those that the learners train."""

    def version_at(self, step: int) -> int:
        """Return the version of the weights that step `step` (from 1) begins with: the number of publishes by then."""
        return (step - 1) // self.publish_every

    def step_of(self, version: int, total_steps: int) -> int:
        """Return the step after which this version of the weights is published."""
        return min(version * self.publish_every, total_steps)

    def publishes_after(self, step: int, total_steps: int) -> bool:
        return step == total_steps or step % self.publish_every == 0


@dataclass(frozen=True)
class BatchSchedule(Schedule):
    """The size of a batch."""

    _title = "batch"

    train_batch_size: Annotated[int, Range(at_least=1)] = DEFAULT_BATCH
    """Prompts of a step, over all ranks; each gets --rollout-n responses."""
    ppo_mini_batch_size: Annotated[int | None, Range(at_least=1)] = None
    """Prompts per optimizer step, over all ranks; by default the whole batch."""

    @property
    def prompts_per_step(self) -> int:
        return self.train_batch_size or self.ppo_mini_batch_size or DEFAULT_BATCH

    @property
    def prompts_per_update(self) -> int:
        return self.ppo_mini_batch_size or self.prompts_per_step

    def check_engines(self, engines: int) -> None:
        """Raise UserError if a step is too small for this many engines."""

    def check(self) -> None:
        """Raise UserError for sizes that cannot work."""
        if self.prompts_per_step % self.prompts_per_update:
            raise UserError(
                f"--train-batch-size {self.prompts_per_step} is not divisible by --ppo-mini-batch-size "
                f"{self.prompts_per_update}: every prompt must be trained. Choose a divisor."
            )


@dataclass(frozen=True)
class OneStepOffSchedule(BatchSchedule):
    """The learners train batch k while the generators make batch k + 1."""

    split: SplitArgs = SplitArgs()

    @property
    def trains_stale(self) -> bool:
        return True


@dataclass(frozen=True)
class AsyncSchedule(BatchSchedule):
    """The asynchronous schedule: batches, publishes of the weights, and the staleness of samples."""

    _title = "schedule"

    split: SplitArgs = SplitArgs()
    train_batch_size: Annotated[int | None, Range(at_least=1)] = None
    """Prompts of a step, over all ranks; each gets --rollout-n responses. The step begins when all of them have arrived.
    Default: --ppo-mini-batch-size, or 8 without it."""
    publish_every: Annotated[int, Range(at_least=1)] = 1
    """Steps from one publish of the weights to the next. A publish sends the learners' weights to the generators."""
    staleness_threshold: Annotated[float, Range(at_least=0, below=1_000_000)] = 1.0
    """How far generation may run ahead of training, in publish periods: 0 is on-policy, 1 is one step off. Fractions work."""
    partial_rollout: Literal["keep", "recompute", "off"] = "keep"
    """What happens to unfinished responses when new weights arrive. keep: they continue with their old KV cache; recompute:
    they continue with a recomputed KV cache; off: the new weights wait until the responses have ended."""
    max_staleness: Annotated[int | None, Range(at_least=0)] = None
    """Age in versions of the oldest token that may be trained; each publish makes a version. By default only
    --staleness-threshold bounds the age."""
    on_stale: Literal["drop", "wait"] = "drop"
    """How --max-staleness is enforced. drop: drop and replace groups that are too old; wait: let the learners wait for old
    groups before these get too old."""

    @property
    def trains_stale(self) -> bool:
        return self.staleness_threshold > 0 or self.publish_every > 1

    @property
    def prompts_per_publish(self) -> int:
        return self.prompts_per_step * self.publish_every

    def quota(self, version: int) -> int:
        """Return the bound of staleness: how many tickets, not counting dropped ones, may have started under the weights of
        this version. Fractions of a prompt are cut off, as in verl."""
        ahead = int(round(self.staleness_threshold * self.prompts_per_publish, 6))  # 0.29 of 100 is 29, not 28.999...
        return (version + 1) * self.prompts_per_publish + ahead

    def check(self) -> None:
        """Raise UserError for settings that cannot work."""
        if self.on_stale == "wait" and self.max_staleness is not None and self.max_staleness < self.staleness_threshold:
            raise UserError(
                f"--on-stale wait cannot keep --max-staleness {self.max_staleness} with --staleness-threshold "
                f"{self.staleness_threshold}: more groups are started than can be trained in time. Raise the first, lower the "
                "second, or give --on-stale drop."
            )


def check_kind(args, kind: type[Schedule], asker: str) -> None:
    """Raise UserError unless the script's schedule is of the kind that the script uses elsewhere. asker: a class or a function
    that the script calls."""
    found = type(args.schedule)
    if not issubclass(found, kind):
        raise UserError(
            f"{asker} works by {kind.__name__}, and the script's Args have {found.__name__}: write `schedule: "
            f"{kind.__name__} = {kind.__name__}()` into them, or start from a copy of the script that has {found.__name__}."
        )

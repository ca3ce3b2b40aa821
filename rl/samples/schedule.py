"""The schedule: the prompts of a step, and how far generation may run ahead of training.

A script's Args have one as `schedule`, and everything that depends on the order of generating, training and publishing is asked
of it. Left out: the schedules of the scripts that split the ranks (rl/samples/split_schedule.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from rl.errors import UserError
from rl.parts import Part
from rl.ranges import DEFAULT_BATCH, Range
from rl.samples.group import Group


@dataclass(frozen=True)
class Schedule(Part, ABC):
    """What every part of a run may ask of its schedule. The constants are flags in the schedules that let them vary."""

    _field = "schedule"

    split: ClassVar[bool] = False  # whether some ranks generate and the others learn; otherwise each does both in turn
    over_sample: ClassVar[float] = 0.0
    publish_every: ClassVar[int] = 1  # steps
    staleness_threshold: ClassVar[float] = 0.0  # publish periods

    @property
    @abstractmethod
    def prompts_per_step(self) -> int: ...

    @property
    @abstractmethod
    def prompts_per_update(self) -> int: ...

    @property
    def surplus(self) -> int:
        """The number of prompts under way that a step does not wait for."""
        return round(self.over_sample * self.prompts_per_step)

    @property
    def trains_stale(self) -> bool:
        """Whether responses may come from weights older than those that the learners train."""
        return self.surplus > 0 or self.staleness_threshold > 0 or self.publish_every > 1

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

    def check(self, args) -> None:
        """Raise UserError for sizes that cannot work."""
        if self.prompts_per_step % self.prompts_per_update:
            raise UserError(
                f"--train-batch-size {self.prompts_per_step} is not divisible by --ppo-mini-batch-size "
                f"{self.prompts_per_update}: every prompt must be trained. Choose a divisor."
            )

    def check_engines(self, engines: int) -> None:
        """Raise UserError if the engines that get no prompt in a step would keep their unfinished ones for ever."""
        if self.surplus and self.prompts_per_step < engines:
            raise UserError(
                f"--over-sample {self.over_sample:g} with --train-batch-size {self.prompts_per_step}: a step has no prompt for "
                f"some of {engines} engines, whose unfinished ones would never end. Raise --train-batch-size, or leave "
                "--over-sample out."
            )


@dataclass(frozen=True)
class SyncSchedule(BatchSchedule):
    """Every rank generates, then every rank learns. With --over-sample more prompts are under way than a step trains.

    Unfinished responses continue in the next step from their last token, under the newer weights (APRIL, arXiv 2509.18521; Kimi
    k1.5's partial rollouts, arXiv 2501.12599). Each prompt is trained once, so the run as a whole does not favour short
    responses; but long ones are trained later, partly from older weights. Their tokens keep the log-probs recorded while
    sampling, with which the loss corrects for this as in async. Prompts under way at the end of the run stay untrained.
    """

    _title = "over-sample"

    over_sample: Annotated[float, Range(at_least=0, at_most=8)] = 0.0
    """Prompts under way in addition to a step's, as a fraction of the step's. A step trains the prompts whose responses end
    first; the others continue in the next step."""

    def to_start(self, under_way: int) -> int:
        """Return the number of prompts to start before the first step, so that the surplus is under way. under_way: prompts
        under way in a resumed run. Raise UserError if they exceed the surplus: no step would wait for them."""
        if under_way > self.surplus:
            raise UserError(
                f"--over-sample {self.over_sample:g}: the resumed run has {under_way} prompts under way beyond a step's, and "
                f"this allows {self.surplus}. Give --over-sample {under_way / self.train_batch_size:g} or more, or start a new "
                "run with another --experiment-name."
            )
        return self.surplus - under_way


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


def check_kind(args, kind: type[Schedule], asker: str) -> None:
    """Raise UserError unless the script's schedule is of the kind that the script uses elsewhere. asker: a class or a function
    that the script calls."""
    found = type(args.schedule)
    if not issubclass(found, kind):
        raise UserError(
            f"{asker} works by {kind.__name__}, and the script's Args have {found.__name__}: write `schedule: "
            f"{kind.__name__} = {kind.__name__}()` into them, or start from a copy of the script that has {found.__name__}."
        )

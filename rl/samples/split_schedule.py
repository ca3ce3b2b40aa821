"""The schedules of the scripts that split the ranks. `AsyncSchedule` decides when a ticket may start.

A ticket is a place in the endless prompt order, drawn from one counter in torchrun's store. The k-th ticket (k from 0) may
start under the weights of version v only if

    k - dropped < (v + 1 + staleness_threshold) * prompts_per_publish

where a publish comes after every publish_every steps (AReaL, arXiv 2505.24298, eq. 3; verl's fully async flags). Threshold 0 is
on-policy if every step publishes, 1 is one step off. Left out: drawing tickets (rl/samples/tickets.py), and which groups are
trained next (rl/samples/stream.py).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from rl.ranges import MayChange, Range
from rl.samples.schedule import BatchSchedule


@dataclass(frozen=True)
class SplitSchedule(BatchSchedule):
    """The split of the ranks into generators and learners."""

    _title = "split"

    split: ClassVar[bool] = True

    generators: MayChange[Annotated[int, Range(at_least=0)]] = 1
    """Ranks of this node that generate; the others learn. Nodes may differ: 0 for a node that only learns, all of its ranks for
    a node that only generates."""


@dataclass(frozen=True)
class OneStepOffSchedule(SplitSchedule):
    """The learners train batch k while the generators make batch k + 1."""

    staleness_threshold: ClassVar[float] = 1.0


@dataclass(frozen=True)
class AsyncSchedule(SplitSchedule):
    """The asynchronous schedule: batches, publishes of the weights, and the staleness of samples."""

    _title = "schedule"

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
    """Age in versions of the oldest token that may be trained; each publish makes a version. Groups that are older are dropped,
    and others are started in their place. By default only --staleness-threshold bounds the age."""

    @property
    def prompts_per_publish(self) -> int:
        return self.prompts_per_step * self.publish_every

    def quota(self, version: int) -> int:
        """Return the bound of staleness: how many tickets, not counting dropped ones, may have started under the weights of
        this version. Fractions of a prompt are cut off, as in verl."""
        ahead = int(round(self.staleness_threshold * self.prompts_per_publish, 6))  # 0.29 of 100 is 29, not 28.999...
        return (version + 1) * self.prompts_per_publish + ahead

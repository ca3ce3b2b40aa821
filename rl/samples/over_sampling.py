"""`--over-sample`, with which a step of train_sync.py does not wait for its longest responses.

More prompts are under way than a step trains. Unfinished responses continue in the next step from their last token, under the
newer weights (APRIL, arXiv 2509.18521; Kimi k1.5's partial rollouts, arXiv 2501.12599). Each prompt is trained once, so the run
as a whole does not favour short responses; but long ones are trained later, and are partly from older weights. Their tokens
keep the log-probs recorded while sampling, with which the loss corrects for this as in async. Prompts under way at the end of
the run stay untrained.
"""

from dataclasses import dataclass
from typing import Annotated

from rl.errors import UserError
from rl.ranges import Range
from rl.samples.schedule import BatchSchedule


@dataclass(frozen=True)
class SyncSchedule(BatchSchedule):
    """Prompts under way beyond the batch."""

    _title = "over-sample"

    over_sample: Annotated[float, Range(at_least=0, at_most=8)] = 0.0
    """Prompts under way in addition to a step's, as a fraction of the step's. A step trains the prompts whose responses end
    first; the others continue in the next step."""

    def check_engines(self, engines: int) -> None:
        """Raise UserError if the engines that get no prompt in a step would keep their unfinished ones for ever."""
        if self.surplus and self.train_batch_size < engines:
            raise UserError(
                f"--over-sample {self.over_sample:g} with --train-batch-size {self.train_batch_size}: a step has no prompt for "
                f"some of {engines} engines, whose unfinished ones would never end. Raise --train-batch-size, or leave "
                "--over-sample out."
            )

    @property
    def surplus(self) -> int:
        """The number of prompts under way that a step does not wait for."""
        return round(self.over_sample * self.train_batch_size)

    @property
    def trains_stale(self) -> bool:
        return self.surplus > 0

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

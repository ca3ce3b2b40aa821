"""--entropy-target: the weight of the entropy bonus is steered from step to step, to keep the policy's entropy above a target.

The entropy that a step's metrics report, per token, in nats, steers the next one by losses.adaptive_entropy_coef.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import losses
from rl.algorithm.whole_batch import MEANS
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.ranges import Range


@dataclass
class EntropyArgs:
    """The bonus for the policy's entropy."""

    entropy_coeff: Annotated[float, Range()] = 0.0
    """Weight of the entropy bonus; the initial one with --entropy-target."""
    entropy_target: Annotated[float | None, Range(above=0)] = None
    """Entropy per token, in nats, that the policy should keep: below it the weight of the entropy bonus grows from step to
    step, above it the weight falls and the bonus is off. 0.2 in arXiv 2505.22312; look at actor/entropy first. Default: the
    weight is constant."""
    entropy_coeff_delta: Annotated[float, Range(above=0)] = 0.005
    """Change of the weight in a step with --entropy-target."""
    entropy_coeff_max: Annotated[float, Range(above=0)] = 1.0
    """Largest weight with --entropy-target."""

    def check(self) -> None:
        """Raise UserError if the entropy cannot be steered."""
        if self.entropy_target is None:
            return
        if self.aggregation not in MEANS:
            raise UserError(
                f"--entropy-target is the entropy of a token: --loss-agg-mode {self.aggregation} sums over tokens. Give "
                f"--loss-agg-mode {' or '.join(MEANS)}, or leave the target out."
            )
        if not 0 <= self.entropy_coeff <= self.entropy_coeff_max:
            raise UserError(
                f"--entropy-coeff {self.entropy_coeff:g} is the first weight that --entropy-target steers: it has to be from 0 "
                f"to --entropy-coeff-max {self.entropy_coeff_max:g}."
            )


class EntropyControl:
    """The weight of the entropy bonus. The same on every learner."""

    def __init__(self, args: EntropyArgs):
        self.args = args
        self.coef = args.entropy_coeff
        self.is_low = False  # the entropy of the last step was at most the target

    @property
    def applied(self) -> float:
        """The weight in the next step."""
        return self.coef if self.is_low else 0.0

    def update(self, entropy: float) -> dict[str, float]:
        """Update the weight after a step with this entropy; return the weight that the step was trained with."""
        args, used = self.args, self.applied
        self.coef = losses.adaptive_entropy_coef(
            self.coef, entropy, args.entropy_target, args.entropy_coeff_delta, args.entropy_coeff_max
        )
        self.is_low = entropy <= args.entropy_target
        return {"actor/entropy_coeff": used}

    def after_step(self, batch: Batch, entropy: float, is_frozen: bool) -> dict[str, float]:
        """Take a step's entropy like `update`, unless the step says nothing about the bonus: it trained no token, or left the
        policy as it was (is_frozen). A collective of the learners that share the batch."""
        if is_frozen or not batch.sum_over_ranks(batch.trained.sum()):
            return {"actor/entropy_coeff": self.applied}
        return self.update(entropy)

    def state(self) -> dict:
        return {"coef": self.coef, "is_low": self.is_low}

    def restore(self, state: dict | None) -> None:
        """Restore `state`. None: the run was not steered before."""
        if state:
            self.coef, self.is_low = state["coef"], state["is_low"]


def steered(args, learner):
    """Return the script's flags, with the --entropy-coeff of this step if --entropy-target steers it."""
    if args.entropy_target is None:
        return args
    return dataclasses.replace(args, entropy_coeff=learner.entropy_control.applied)

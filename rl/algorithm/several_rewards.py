"""Several named rewards of a response, for estimators that compare each one separately (gdpo): the flags, and a batch's values.
The names are those of a reward function's numbers, as they are logged."""

from dataclasses import dataclass

import torch
from torch import Tensor

import losses
from rl.errors import UserError
from rl.learning.batch import Batch
from rl.samples.group import PENALTY, Group


@dataclass
class SeveralRewardsArgs:
    """Rewards that are normalised separately."""

    gdpo_reward_keys: tuple[str, ...] = ()
    """For --adv-estimator gdpo: names of the numbers that the reward function, or the judge, returns; "score" is the score."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """For --adv-estimator gdpo: the weight of each of --gdpo-reward-keys. Default: 1 each."""

    @property
    def has_several_rewards(self) -> bool:
        """Whether the estimator compares named rewards, not the score."""
        return "parts" in losses.ADVANTAGES[self.adv_estimator].inputs

    @property
    def compared_rewards(self) -> tuple[str, ...]:
        """Names of the rewards that are compared within a group (Group.differs); empty if it is the score."""
        return self.gdpo_reward_keys if self.has_several_rewards else ()

    def has_signal(self, group: Group) -> bool:
        """Return whether the estimator can learn from the group (--filter-groups)."""
        return group.differs(self.compared_rewards)

    def several_rewards(self, batch: Batch) -> dict[str, Tensor]:
        """Return parts [B, K] and weights [K] for the estimator. Raise UserError if a response does not have a number."""
        keys = self.gdpo_reward_keys
        rows = [[_number(batch, i, key) for key in keys] for i in range(len(batch.score))]
        weights = self.gdpo_reward_weights or [1.0] * len(keys)
        return {
            "parts": torch.tensor(rows, dtype=torch.float64).reshape(-1, len(keys)),
            "weights": torch.tensor(weights, dtype=torch.float64),
        }

    def check(self) -> None:
        """Raise UserError for rewards that are not named, and for flags that would not affect the advantage."""
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if not self.has_several_rewards:
            return
        if not keys or len({*keys}) < len(keys):
            raise UserError(
                f"--adv-estimator {self.adv_estimator} compares named rewards: give --gdpo-reward-keys, each once, such as "
                "`--gdpo-reward-keys correct clear` for a reward function that returns these numbers."
            )
        if weights and len(weights) != len(keys):
            raise UserError(f"--gdpo-reward-weights has {len(weights)} numbers for the {len(keys)} --gdpo-reward-keys.")
        if self.use_kl_in_reward:
            raise UserError(
                f"--use-kl-in-reward changes the score, which --adv-estimator {self.adv_estimator} does not look at. Take "
                "--use-kl-loss."
            )
        if getattr(self, "overlong_buffer_len", 0) and not {PENALTY, "score"} & {*keys}:
            raise UserError(f"--overlong-buffer-len: add its number, {PENALTY}, to --gdpo-reward-keys.")


def _number(batch: Batch, response: int, key: str) -> float:
    numbers = batch.extra[response]
    if key == "score":
        return float(batch.score[response])
    if key in numbers:
        return numbers[key]
    if batch.failed[response]:  # --on-reward-error zero
        return 0.0
    raise UserError(
        f"--gdpo-reward-keys {key}: the reward function did not return this number with a response, but "
        f"{', '.join(['score', *numbers])}. Return it with each, or name others."
    )

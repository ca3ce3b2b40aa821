"""The weight of the KL to the reference policy, where the reward is charged with it."""

import losses
from rl.algorithm_args import AlgorithmArgs


class KLControl:
    """The weight of the KL in the reward: fixed, or steered towards --target-kl."""

    def __init__(self, args: AlgorithmArgs):
        self.args, self.coef = args, args.kl_coef

    def update(self, kl: float, responses: int) -> dict[str, float]:
        """Takes the batch's KL per token; returns it and the weight that the batch was trained with, under verl's names."""
        used = self.coef
        if self.args.kl_ctrl_type == "adaptive":
            self.coef = losses.adaptive_kl_coef(used, kl, self.args.target_kl, responses, self.args.horizon)
        return {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": used}

    def state(self) -> float:
        return self.coef

    def restore(self, state: float) -> None:
        self.coef = state

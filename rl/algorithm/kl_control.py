"""The weight of the KL to the reference policy in the reward."""

import losses
from rl.algorithm.args import AlgorithmArgs


class KLControl:
    """The weight of the KL in the reward: fixed, or steered towards --target-kl."""

    def __init__(self, args: AlgorithmArgs):
        self.args = args
        self.coef = args.kl_reward_coef

    def update(self, kl: float, responses: int) -> dict[str, float]:
        """Update the weight after a batch with this KL per token; return the KL and the weight that the batch had."""
        used = self.coef
        if self.args.kl_ctrl_type == "adaptive":
            self.coef = losses.adaptive_kl_coef(used, kl, self.args.target_kl, responses, self.args.kl_horizon)
        return {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": used}

    def state(self) -> dict[str, float]:
        return {"coef": self.coef, "kl_coef": self.args.kl_reward_coef}

    def restore(self, state: dict[str, float] | float) -> None:
        """Restore the steered weight. If nothing steers it, or the flag has changed, the flag's weight is used, and steering
        starts from it. Older checkpoints only have the weight."""
        if not isinstance(state, dict):
            state = {"coef": state, "kl_coef": self.args.kl_reward_coef}
        if self.args.kl_ctrl_type == "adaptive" and state["kl_coef"] == self.args.kl_reward_coef:
            self.coef = state["coef"]

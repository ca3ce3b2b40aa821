"""PPO's critic in the algorithm: its flags, the models that can be one, and its part of a step.

losses.py has the formulas, rl/learning/value_model.py the model and its optimizer, imported only for `--adv-estimator gae`.
Left out: a critic that shares the policy's layers, which would change what the policy learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch

import losses
from rl.algorithm import whole_batch
from rl.algorithm.teacher import check_vocabulary
from rl.data.image_prompts import takes_images
from rl.errors import UserError
from rl.learning.batch import Batch, MicroBatch
from rl.learning.loss_means import LossMeans
from rl.model.pretrained import check_model, load_config
from rl.ranges import Content, Range

if TYPE_CHECKING:
    from rl.learning.value_model import Critic

AGGREGATION = "token-mean"  # of the critic's loss


@dataclass
class CriticArgs:
    """The critic of --adv-estimator gae, a second model that is trained to predict returns."""

    critic_model: Annotated[str | None, Content("model")] = None
    """Model that the critic starts from, with the policy's vocabulary: a Hugging Face directory or hub name. By default
    --model."""
    critic_lr: Annotated[float, Range(above=0, at_most=1)] = 1e-4
    """Peak learning rate of the critic. The other flags of the optimizer are the policy's."""
    critic_ppo_epochs: Annotated[int, Range(at_least=1)] = 1
    """The critic's passes over each batch."""
    critic_warmup: Annotated[int, Range(at_least=0)] = 0
    """Training steps at the start in which only the critic learns. The policy's learning rate schedule begins afterwards."""
    lam: Annotated[float, Range(at_least=0, at_most=1)] = 1.0
    """GAE's lambda: 1 compares whole returns with the critic's values, 0 looks one token ahead."""
    critic_lam: Annotated[float | None, Range(at_least=0, at_most=1)] = None
    """Lambda of the returns that the critic learns: VAPO, arXiv 2504.05118, uses 1 for it and less for the policy. Default:
    --lam."""
    cliprange_value: Annotated[float, Range(above=0)] = 0.5
    """How far an update may move the critic's values from the previous ones."""

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator compares with a critic's values."""
        return "value" in losses.ADVANTAGES[self.adv_estimator].inputs

    @property
    def returns_lam(self) -> float:
        return self.lam if self.critic_lam is None else self.critic_lam

    def check(self) -> None:
        """Raise UserError for flags that cannot be combined with a critic."""
        if not self.needs_critic:
            return
        estimator = f"--adv-estimator {self.adv_estimator}"
        if self.adapted:
            raise UserError(f"{estimator} trains a whole critic, which --lora-rank is there to avoid. Leave one of them out.")
        if self.expert_parallel > 1:
            raise UserError(f"--expert-parallel divides the policy's experts, not a critic's. Leave it out with {estimator}.")


def check_critic(path: str, args, policy: str) -> None:
    """Raise UserError unless the model at `path` can be the critic of the one at `policy`. No weights are read."""
    if args.critic_model:
        tokenizer = check_vocabulary(path, args, policy, "--critic-model", "A critic")
        check_model(path, tokenizer, args, "--critic-model")
    if any(takes_images(load_config(at, args.trust_remote_code)) for at in (path, policy)):
        raise UserError(f"--adv-estimator {args.adv_estimator}: models that take images cannot have a critic here.")


def learn_values(
    args, critic: "Critic", batch: Batch, minis: Sequence[torch.Tensor], micros: Sequence[Sequence[MicroBatch]]
) -> dict[str, float]:
    """Train the critic towards the returns: an optimizer step for each mini-batch, --critic-ppo-epochs times. minis: the
    responses [b] of each; micros: its micro-batches. Set the targets' returns; return verl's critic/*. A collective."""
    of_tokens = (batch.targets.reward, batch.trained, batch.seq, batch.targets.value)
    batch.targets.returns = losses.lambda_return(*of_tokens, args.gamma, args.returns_lam)
    means = LossMeans(batch, critic.ranks)
    for mini, its_micros in list(zip(minis, micros, strict=True)) * args.critic_ppo_epochs:
        denominator = whole_batch.denominator(batch, mini, AGGREGATION, args.max_response_length)
        for micro in its_micros:
            t = batch.at(micro)
            value = critic.values(micro)
            token_loss, stats = losses.value_loss(value, t.value, t.returns, t.mask, clip=args.cliprange_value)
            loss = losses.aggregate(token_loss, t.mask, t.seq, AGGREGATION, denominator)
            loss.backward()
            means.gather(t, {"vf_loss": loss}, stats | {"vpred_mean": value})
        means.end_update(critic.step())
    found = {name.replace("actor/", "critic/"): value for name, value in means.metrics().items()}
    return found | {"critic/vf_explained_var": explained_variance(batch)}


def explained_variance(batch: Batch) -> float:
    """Return 1 - E (V - R)^2 / var(R) over the whole batch's trained tokens, V from before the update: 1 for a perfect critic,
    0 for one that only knows the mean, negative for a worse one; 0 if all returns are equal. verl takes the variance of R - V,
    which a constant error does not change. A collective."""
    value, returns = (x[batch.trained].double() for x in (batch.targets.value, batch.targets.returns))
    own = [torch.ones_like(returns), returns, returns**2, (value - returns) ** 2]
    count, total, squares, errors = batch.sum_over_ranks(torch.stack([x.sum() for x in own])).tolist()
    variance = squares / max(1.0, count) - (total / max(1.0, count)) ** 2
    return 1 - errors / count / variance if variance > 1e-12 else 0.0

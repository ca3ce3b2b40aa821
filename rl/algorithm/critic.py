"""PPO's critic: a copy of the policy's model, or another model, whose output is a number instead of a distribution. Only
imported with --adv-estimator gae.

V of a token is a linear function of the hidden state that predicts it, which has seen everything before the token but not the
token itself. The function starts as zero. Everything else is a learner's: shards, optimizer, checkpoint. Left out: a
critic that shares the policy's layers, which would change what the policy learns.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import nn

import losses
from rl.algorithm import whole_batch
from rl.algorithm.whole_batch import LossMeans
from rl.errors import UserError
from rl.learning.batch import Batch, MicroBatch, Micros, Tokens
from rl.learning.learner import Learner
from rl.model.policy import Policy
from rl.model.pretrained import check_second_model, load_config, takes_images
from rl.model.sequence_parallel import gather_log_probs
from rl.ranks.dist import Ranks
from rl.ranks.shards import local
from rl.ranks.watchdog import progress

AGGREGATION = "token-mean"  # of the critic's loss


def check_critic(path: str, args, policy: str) -> None:
    """Raise UserError unless the model at `path` can be the critic of the one at `policy`. No weights are read."""
    if args.critic.critic_model:
        check_second_model(path, args, policy, "--critic-model", "A critic")
    if any(takes_images(load_config(at, args.trust_remote_code)) for at in (path, policy)):
        raise UserError(f"--adv-estimator {args.loss.adv_estimator}: models that take images cannot have a critic here.")


class ValueModel(Policy):
    """A causal language model with one output, `value_head` [hidden], instead of the vocabulary."""

    def __init__(self, model: nn.Module, *rest):
        super().__init__(model, *rest)
        model.lm_head = nn.Identity()  # a tied output layer stays as the embedding
        model.value_head = nn.Parameter(torch.empty(model.config.get_text_config().hidden_size, device="meta"))

    def forward(self, inputs: dict, layout, predict) -> torch.Tensor:
        """The model's inputs, predict [n] -> V before each token [n], fp32."""
        if self.router:
            self.router.begin(layout, None, 0)
        return self._hidden(inputs, layout, predict).float() @ self.model.value_head.float()


class Critic(Learner):
    """The critic under training, its optimizer and schedule."""

    role = "critic"
    kind = ValueModel

    def __init__(self, path: str, args, ranks: Ranks, total_steps: int):
        """path: the model, as a directory or hub name. args: CommonArgs; the critic has its own learning rate."""
        self.warmup = args.critic.critic_warmup
        self._script_args = args
        self.is_known = args.critic.critic_model is None
        own = dataclasses.replace(args.learner, lr=args.critic.critic_lr, router_replay="off")
        super().__init__(path, own, ranks, total_steps, trust_remote_code=args.trust_remote_code)
        nn.init.zeros_(local(self.policy.model.value_head.data))

    def values(self, micro: MicroBatch) -> torch.Tensor:
        """Return V [n] before each of the micro-batch's n tokens, on the device, with gradient."""
        progress()
        own = self.policy(micro.inputs, micro.layout, micro.predict)
        return own if micro.own is None else gather_log_probs(micro, self.ranks, own, torch.zeros_like(own))[0]

    @torch.no_grad()
    def values_of(self, batch: Batch, micros: Micros) -> torch.Tensor:
        """Return V [N] before the tokens that this rank trains, on the CPU; 0 outside the mask."""
        out = torch.zeros(len(batch.token))
        for micro in itertools.chain.from_iterable(micros):
            out[micro.index] = self.values(micro).cpu()
        self.policy.reshard()
        return out

    def learn(self, batch: Batch, minis: Sequence[torch.Tensor], micros: Micros) -> dict[str, float]:
        """Train the critic towards the returns: an optimizer step for each mini-batch, --critic-ppo-epochs times. minis: the
        responses [b] of each; micros: its micro-batches. Set the targets' returns; return verl's critic/*. A collective."""
        args = self._script_args
        of_tokens = (batch.targets.reward, batch.trained, batch.seq, batch.targets.value)
        batch.targets.returns = losses.lambda_return(*of_tokens, args.loss.gamma, args.critic.lam)
        means = LossMeans(batch)
        for mini, its_micros in list(zip(minis, micros, strict=True)) * args.critic.critic_ppo_epochs:
            denominator = whole_batch.denominator(batch, mini, AGGREGATION, args.sampling.max_response_length)
            for micro in its_micros:
                t = Tokens.of(batch, micro)
                value = self.values(micro)
                token_loss, stats = losses.value_loss(value, t.value, t.returns, t.mask, clip=args.critic.cliprange_value)
                loss = losses.aggregate(token_loss, t.mask, t.seq, AGGREGATION, denominator)
                loss.backward()
                means.add(t, None, {"vf_loss": loss}, stats | {"vpred_mean": value})
            means.end_update(self.step())
        found = {name.replace("actor/", "critic/"): value for name, value in means.metrics().items()}
        return found | {"critic/vf_explained_var": explained_variance(batch)}


def explained_variance(batch: Batch) -> float:
    """Return 1 - E (V - R)^2 / var(R) over the whole batch's trained tokens, V from before the update: 1 for a perfect critic,
    0 for one that only knows the mean, negative for a worse one; 0 if all returns are equal. verl takes the variance of R - V,
    which a constant error does not change. A collective."""
    value, returns = (x[batch.trained].double() for x in (batch.targets.value, batch.targets.returns))
    own = [torch.ones_like(returns), returns, returns**2, (value - returns) ** 2]
    count, total, squares, errors = whole_batch.sum_over_ranks(batch, torch.stack([x.sum() for x in own])).tolist()
    variance = squares / max(1.0, count) - (total / max(1.0, count)) ** 2
    return 1 - errors / count / variance if variance > 1e-12 else 0.0

"""The critic: a copy of the policy's model, or another model, whose output is a number instead of a distribution.

V of a token is a linear function of the hidden state that predicts it, which has seen everything before the token but not the
token itself. The function starts as zero. Everything else is a learner's: shards, masters, optimizer, checkpoint.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import nn

from rl.learning.batch import Batch, MicroBatch
from rl.learning.learner import Learner
from rl.learning.placement import load_policy
from rl.model.policy import Policy
from rl.model.sequence_parallel import gather_log_probs
from rl.model.shards import local
from rl.ranks.dist import Ranks
from rl.ranks.watchdog import progress


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
        hidden = self._hidden(inputs, layout)[predict]  # [n, hidden]
        return hidden.float() @ self.model.value_head.float()


class Critic(Learner):
    """The critic under training, its optimizer and schedule."""

    def __init__(self, path: str, args, ranks: Ranks, total_steps: int):
        """path: the model, as a directory or hub name. args: CommonArgs; the critic has its own learning rate."""
        self.warmup = args.critic_warmup
        self._is_known = args.critic_model is None
        own = dataclasses.replace(args, lr=args.critic_lr, router_replay="off")
        super().__init__(path, own, ranks, total_steps, trust_remote_code=args.trust_remote_code)

    def _load(self, *what) -> ValueModel:
        more = {"kind": ValueModel, "is_known": self._is_known}
        critic = load_policy(self.path, self.args, self.ranks, "critic", *what, **more)
        nn.init.zeros_(local(critic.model.value_head.data))
        return critic

    def values(self, micro: MicroBatch) -> torch.Tensor:
        """Return V [n] before each of the micro-batch's n tokens, on the device, with gradient."""
        progress()
        own = self.policy(micro.inputs, micro.layout, micro.predict)
        return own if micro.own is None else gather_log_probs(micro, self.ranks, own, torch.zeros_like(own))[0]

    @torch.no_grad()
    def values_of(self, batch: Batch, micros: Sequence[Sequence[MicroBatch]]) -> torch.Tensor:
        """Return V [N] before the tokens that this rank trains, on the CPU; 0 outside the mask."""
        out = torch.zeros(len(batch.token))
        for micro in itertools.chain.from_iterable(micros):
            out[micro.index] = self.values(micro).cpu()
        self.policy.reshard()
        return out

"""Runs steps of train_sync.py in this process, for tests that compare many steps."""

import torch

import losses
import train_sync
from rl import parts
from rl.algorithm.critic import Critic
from rl.algorithm.metrics import batch_metrics, rollout_metrics
from rl.generation.engine import EngineRanks
from rl.generation.generator import Generator
from rl.generation.make import make_generator
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.ranges import check
from rl.ranks import dist
from rl.ranks.shards import local
from rl.ranks.timers import Timers
from rl.rewards.pool import ScoringPool
from rl.setup import set_up

FORKED = ("gdpo", "optimal_token_baseline")  # in losses.py; examples/forks has what they need

ESTIMATORS = [name for name, f in losses.ADVANTAGES.items() if name == f.function.__name__ and name not in FORKED]


def learn_and_report(args: train_sync.Args, learner: Learner, batch: Batch) -> dict[str, float]:
    """The metrics of `learn`, and those that a run reports of the batch."""
    metrics = train_sync.learn(args, learner, batch, Timers())
    return metrics | rollout_metrics(args.correction, batch) | batch_metrics(batch)


class Trainer:
    """The parts of train_sync.train, set up once; `steps` trains with other flags on the same model."""

    def __init__(self, model: str, ranks: dist.Ranks):
        self.ranks = ranks
        size = {"rollout_n": 4, "train_batch_size": 4}
        self.args = parts.make(train_sync.Args, model=model, lr_warmup_steps=0, lr=1e-5, **size)
        self.job = set_up(self.args, train_sync.__file__)
        self.pool = ScoringPool(self.args.reward)
        self.learner = Learner(model, self.args.learner, self.ranks, 10**6, with_reference=True)
        self.engine = make_generator(self.args, self.job, self.ranks, self.pool).engine
        self.ticket, self.first = 0, {}
        self.begin_again()

    def generator(self, args: train_sync.Args) -> Generator:
        return Generator(self.engine, self.job, self.pool, args, EngineRanks(self.ranks, 1))

    def steps(self, n: int, **flags) -> list[tuple[dict, object]]:
        """(metrics, batch) of n steps."""
        args = parts.replace(self.args, **flags)
        check(args)
        generator = self.generator(args)
        self.learner.args = args.learner
        out = []
        if args.loss.needs_critic and not self.learner.critic:
            self.learner.critic = Critic(self.learner.path, args, self.ranks, 10**6)
        for _ in range(n):
            self.engine.update(self.learner.weights(), version=0)
            groups, self.ticket, metrics = train_sync.make_batch(args, generator, self.ticket)
            batch = Batch.of(groups)
            metrics |= learn_and_report(args, self.learner, batch)
            out.append((metrics, batch))
        return out

    @torch.no_grad()
    def begin_again(self) -> None:
        """Restore the model's own weights, and the optimizer's state before its first step: the moments of another run would
        move the weights before there is a gradient."""
        for state in self.learner.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
        for name, weight in self.learner.policy.named_parameters():
            local(weight).copy_(self.first.setdefault(name, local(weight).clone()))

    def weights(self) -> torch.Tensor:
        return torch.cat([w.flatten() for _, w in self.learner.weights()])

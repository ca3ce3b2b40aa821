"""Started by test_learner.py: computes log-probs and the gradient of a batch, divided into micro-batches by each of the token
budgets. Then the last rank's gradient is not finite, and all ranks must leave out the update.

torchrun ... gradients.py MODEL OUT True|False          whether with gradient checkpointing
"""

import sys

import numpy as np
import torch
from helpers import make_group, whole

from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch
from rl.learning.learner import Learner
from rl.learning.micro_batches import micro_batches
from rl.ranks import dist, process

BUDGETS = [32, 100, 4096]


def main(ranks):
    model, out, checkpointing = sys.argv[1:]
    rng = np.random.default_rng(0)
    batch = Batch.of([make_group(t, rng.integers(1, 20, 3), prompt=int(rng.integers(1, 12)), rng=rng) for t in range(5)])
    weight = torch.from_numpy(rng.standard_normal(len(batch.token))).float()
    args = LearnerArgs(lr_warmup_steps=0, gradient_checkpointing=checkpointing == "True")
    learner = Learner(model, args, ranks, 10, temperature=0.7, with_reference=True)
    result = {}
    for budget in BUDGETS:
        micros = micro_batches(batch, torch.arange(len(batch.lengths)), budget, ranks)
        for name, which in {"log_prob": "policy", "ref": "reference"}.items():
            own = learner.log_probs_of(which, batch, [micros])  # 0 for tokens of other ranks
            result[f"{budget}/{name}"] = dist.all_reduce_sum(own, learner.ranks.data_group)
        for micro in micros:
            made = learner.forward(micro, entropy="loss")
            ((made.log_prob + 0.1 * made.entropy) * weight[micro.index]).sum().div(len(weight)).backward()
        grads = [whole(p.grad).flatten().float() for p in learner.policy.parameters()]
        result[f"{budget}/grad"] = torch.cat(grads)
        result[f"{budget}/micros"] = torch.tensor(len(micros))
        learner.optimizer.zero_grad()
    names = [name for name, _ in learner.policy.model.named_parameters()]
    if ranks.is_main:
        inputs = {"token": batch.token, "lengths": batch.lengths, "prompts": [p.tolist() for p in batch.prompts]}
        torch.save({"names": names, **result, **inputs, "weight": weight}, out)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    for factor, moves in ((float("nan"), False), (1.0, True)):
        for micro in micros:
            (learner.forward(micro).log_prob.sum() * (factor if ranks.rank == ranks.world_size - 1 else 1.0)).backward()
        metrics = learner.step()
        after = dict(learner.weights())
        assert any(not torch.equal(before[name], after[name]) for name in before) == moves, factor
        assert metrics["actor/skipped_steps"] == 1, "they are counted"


process.run(main)

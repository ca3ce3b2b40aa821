"""Started by test_learner.py: computes log-probs and the gradient of a batch, divided into micro-batches by each of the token
budgets.

torchrun ... gradients.py MODEL OUT JSON       {"budgets": [...], "groups": n, "responses": n, "logits_at_once": n, "flags": {}}
"""

import json
import sys

import numpy as np
import torch
from helpers import make_group, whole

from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.model import policy
from rl.ranks import dist, process


def main(ranks):
    model, out, what = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    policy.LOGITS_AT_ONCE = what.get("logits_at_once") or policy.LOGITS_AT_ONCE
    n, options = what["responses"], what["flags"]
    rng = np.random.default_rng(0)
    groups = [make_group(t, rng.integers(1, 20, n), prompt=int(rng.integers(1, 12)), rng=rng) for t in range(what["groups"])]
    batch = Batch.of(groups)
    weight = torch.from_numpy(rng.standard_normal(len(batch.token))).float()
    learner = Learner(model, LearnerArgs(lr_warmup_steps=0, **options), ranks, 10, temperature=0.7, with_reference=True)
    result = {}
    for budget in what["budgets"]:
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


process.run(main)

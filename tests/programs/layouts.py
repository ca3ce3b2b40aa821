"""Started by tests/layouts.py: `learn` of train_sync.py on the same batches, for each layout of ranks and each loss.

torchrun ... layouts.py OUT JSON
{"layouts": {name: [model, flags]}, "cases": {name: [flags, sizes of the responses of each group]}, "attention": kind}
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import kernels
from helpers import make_group

import train_sync
from rl import process
from rl.batch import Batch
from rl.kl_control import KLControl
from rl.learner import Learner
from rl.timers import Timers


def learn(model: str, sizes: list[list[int]], flags: dict, ranks) -> dict:
    """The gradient of each update, the metrics, and the weights after them."""
    lengths = {"max_prompt_length": 12, "max_response_length": max(map(max, sizes))}
    args = train_sync.Args(model=model, train_batch_size=len(sizes), lr_warmup_steps=0, **lengths, **flags)
    learner = Learner(model, args, ranks, 10, with_reference=args.needs_reference)
    gradients, step = [], learner.step

    def recorded() -> dict:
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in learner.policy.parameters()]))
        return step()

    learner.step, rng = recorded, np.random.default_rng(0)
    groups = [make_group(t, n, prompt=int(rng.integers(1, 13)), rng=rng) for t, n in enumerate(sizes)]
    metrics = train_sync.learn(args, learner, KLControl(args), Batch.of(groups), Timers())
    metrics |= learner.router_metrics()
    weights = torch.cat([w.flatten() for _, w in learner.weights()])
    return {"gradients": gradients, "metrics": metrics, "weights": weights}


def main(ranks) -> None:
    out, what = sys.argv[1], json.loads(sys.argv[2])
    found = {}
    if what["attention"] != "cpu":
        kernels.give_to_cpu(what["attention"])
    for layout, (model, flags) in what["layouts"].items():
        for case, (more, sizes) in what["cases"].items():
            found[f"{layout}/{case}"] = learn(model, sizes, flags | more, ranks)
    if ranks.is_main:
        torch.save(found, out)


process.run(main)

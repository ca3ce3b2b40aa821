"""Started under torchrun by test_learner.py: compares a learner's weights, gathered with one collective per bucket on several
ranks, with DTensor's own full tensors. Prints the number of collectives."""

import sys

import torch
import torch.distributed as torch_dist

from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.model import shards
from rl.ranks import dist, process


def main(ranks: dist.Ranks) -> None:
    shards.BUCKET_BYTES = int(sys.argv[2])
    learner = Learner(sys.argv[1], LearnerArgs(), ranks, total_steps=1)
    expected = {name: p.full_tensor() for name, p in learner.policy.model.named_parameters()}
    list(learner.weights())  # the ranks tell each other where their shards lie, once
    calls = []
    for name in ("all_gather", "gather"):
        collective = getattr(torch_dist, name)
        setattr(torch_dist, name, lambda *a, c=collective, name=name, **k: (calls.append(name), c(*a, **k))[1])
    for dtype in (torch.float32, torch.bfloat16):
        for to in (None, [0], [1], [0, 2]):
            calls.clear()
            found = dict(learner.weights(dtype, to))
            assert list(found) == (list(expected) if to is None or ranks.rank in to else [])
            for name, whole in found.items():
                assert whole.dtype == dtype and torch.equal(whole, expected[name].to(dtype)), name
            each = calls.count("all_gather") if to is None else calls.count("gather") / len(to)
            print(f"{dtype} to={to}: {each:.0f} collectives", flush=True)


process.run(main, join=dist.init)

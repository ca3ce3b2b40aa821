"""Started by test_learner.py: only the last rank's gradient is not finite, then every rank's.

torchrun ... non_finite.py MODEL
"""

import sys

import torch
from helpers import make_group

from rl.learning.args import LearnerArgs
from rl.learning.batch import Batch, micro_batches
from rl.learning.learner import Learner
from rl.ranks import dist, process


def main(ranks):
    batch = Batch.of([make_group(0, [3, 4])])
    learner = Learner(sys.argv[1], LearnerArgs(lr_warmup_steps=0), ranks, 10)
    before = {k: v.clone() for k, v in learner.weights()}
    for factor, moved in ((float("nan"), False), (1.0, True)):
        for micro in micro_batches(batch, torch.arange(2), 100, ranks):
            # the fault is on one rank only: all must skip together
            log_prob = learner.forward(micro).log_prob
            (log_prob.sum() * (factor if ranks.rank == ranks.world_size - 1 else 1.0)).backward()
        metrics = learner.step()
        after = dict(learner.weights())
        assert any(not torch.equal(before[k], after[k]) for k in before) == moved, (factor, moved)
        assert metrics["actor/skipped_steps"] == 1
    dist.barrier()


process.run(main)

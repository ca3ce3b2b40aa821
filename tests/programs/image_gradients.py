"""Started by test_vision_runs.py: computes the gradient of a batch in which only the first rank's micro-batches have images.

torchrun ... image_gradients.py MODEL ROWS OUT JSON       JSON: flags of the learner
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "model"))
from helpers import whole
from test_vision import dataset, make_batch

from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.learning.micro_batches import MicroBatch
from rl.ranks import process
from rl.ranks.dist import all_reduce_sum


def main(ranks):
    model, rows, out, flags = *sys.argv[1:4], json.loads(sys.argv[4])
    batch = make_batch(dataset(model, rows), [9, 9])
    weight = torch.randn(len(batch.token), generator=torch.Generator().manual_seed(0))
    learner = Learner(model, LearnerArgs(lr_warmup_steps=0, **flags), ranks, 10, with_reference=True)
    has_image = [[0, 1, 2, 3], [6, 7]]  # responses to rows with images, in two micro-batches
    parts = [has_image, [[4, 5], []]] if ranks.world_size == 2 else [[*has_image, [4, 5]]]
    micros = [MicroBatch.of(batch, part, ranks.device) for part in parts[ranks.rank]]
    own = {which: learner.log_probs_of(which, batch, [micros]) for which in ("policy", "reference")}  # 0 for others' tokens
    result = {which: all_reduce_sum(log_prob, ranks.data_group) for which, log_prob in own.items()}
    for micro in micros:
        log_prob = learner.forward(micro).log_prob
        (log_prob * weight[micro.index]).sum().backward()
    gradients = {name: whole(p.grad).clone() for name, p in learner.parameters.items() if p.grad is not None}
    metrics = learner.step()
    after = {name: tensor.clone() for name, tensor in learner.weights()}
    if ranks.is_main:
        state = [name for name in learner.state_tensors() if name.startswith("exp_avg.")]
        torch.save({**result, "grad": gradients, "after": after, "norm": metrics["actor/grad_norm"], "state": state}, out)
    else:
        learner.state_tensors()


process.run(main)

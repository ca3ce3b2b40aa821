"""Started by test_sharded_weights.py: checks that every rank's part of the weights equals transformers' weights bit for bit.

torchrun ... load_parts.py FLAGS(JSON) MODEL...       # a line of each model
"""

import json
import sys

import torch
from torch.distributed.tensor import DTensor

from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.model.pretrained import auto_class, load_config
from rl.ranks import process
from rl.ranks.dist import all_gather_values


def is_whole(path: str, ranks) -> bool:
    learner = Learner(path, LearnerArgs(**json.loads(sys.argv[1])), ranks, total_steps=1)
    expected = auto_class(load_config(path)).from_pretrained(path, dtype=torch.float32)
    parameters = dict(learner.policy.model.named_parameters())
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in parameters.values())
    own = all(torch.equal(p.full_tensor(), expected.get_parameter(name)) for name, p in parameters.items())
    buffers = dict(learner.policy.model.named_buffers())
    return own and all(torch.equal(buffer, buffers[name]) for name, buffer in expected.named_buffers())


def main(ranks) -> None:
    for path in sys.argv[2:]:
        whole = is_whole(path, ranks)
        if all(all_gather_values(whole)) and ranks.is_main:
            print("the same on all ranks", flush=True)


process.run(main)

"""Started by test_sharded_weights.py: checks that every rank's part of the weights equals transformers' weights bit for bit.

torchrun ... load_parts.py FLAGS(JSON) MODEL...       # of each case a line, with how many tensors the first has sent
"""

import json
import sys

import torch
from torch.distributed.tensor import DTensor

from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.model import loading
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
    find, from_first, sent = loading.find, loading._from_first, []

    def counted(weights, name: str, *more) -> torch.Tensor:
        sent.append(name)
        return from_first(weights, name, *more)

    loading._from_first = counted
    for path in sys.argv[2:]:
        for case in ("seen by all", "not seen by the last"):
            blind = case != "seen by all" and ranks.rank == ranks.world_size - 1
            loading.find = (lambda *_: None) if blind else find
            sent.clear()
            whole = is_whole(path, ranks)
            if all(all_gather_values(whole)) and ranks.is_main:
                print(f"{case}: the same on all ranks, {len(sent)} sent", flush=True)


process.run(main)

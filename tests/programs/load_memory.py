"""Started by test_sharded_weights.py: measures the peak memory, in bytes per parameter, while the learner loads its model and
while it first publishes it in bf16. Prints a line of JSON, by rank.

torchrun ... load_memory.py MODEL FLAGS(JSON)
"""

import json
import sys

import torch
from memory import Peak

from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import dist, launch, process
from rl.ranks.gathering import BUCKET_BYTES
from rl.split import Split
from rl.weights.publish import Publisher


def main(ranks: dist.Ranks) -> None:
    with Peak() as load:
        learner = Learner(sys.argv[1], LearnerArgs(**json.loads(sys.argv[2])), ranks, total_steps=10)
    nodes, bridge = [launch.Node("here", 0, ranks.world_size + 1, 1)], object() if ranks.is_main else None
    split = Split("learner", ranks, ranks.world_size, 1, nodes, 0, torch.distributed.HashStore(), bridge)
    with Peak() as publish:
        publisher = Publisher(learner, split, torch.bfloat16)
        publisher.take_copy()
    sizes = [p.numel() for p in learner.policy.parameters()]
    own = {"load": load.added, "kept": load.kept, "publish": publish.added}
    own |= {"tensor": 4 * max(sizes), "bucket": max(BUCKET_BYTES, 2 * max(sizes))}
    own = {name: size / sum(sizes) for name, size in own.items()}
    everyone = dist.all_gather_values(own)
    if ranks.is_main:
        print(json.dumps(everyone))


process.run(main)

"""Started by test_sharded_weights.py: each rank's peak of memory while the learner loads its model, in bytes a parameter.

torchrun ... load_memory.py MODEL FLAGS(JSON)
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from memory import Peak

from rl import process
from rl.dist import all_gather_bytes
from rl.learner import Learner, LearnerArgs


def main(ranks) -> None:
    with Peak() as peak:
        learner = Learner(sys.argv[1], LearnerArgs(**json.loads(sys.argv[2])), ranks, total_steps=10)
    shapes = [p.numel() for p in learner.policy.parameters()]
    own = [peak.added / sum(shapes), peak.kept / sum(shapes), max(shapes) / sum(shapes)]
    everyone = [json.loads(record) for record in all_gather_bytes(json.dumps(own).encode())]
    if ranks.is_main:
        print(json.dumps(everyone))


process.run(main)

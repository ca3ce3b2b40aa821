"""Started under torchrun on machines of tests/tools/nodes.py: the learner publishes, and the first generator of each node
prints the bytes that its node's link received meanwhile.

    torchrun ... receive_bytes.py MODEL VERSIONS GENERATORS       GENERATORS: of this node
"""

import sys
from pathlib import Path

import torch

from rl.generation.embedded.engine import TransformersEngine
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import dist, process
from rl.samples.channel import ControlBlock
from rl.split import Split, init_split
from rl.weights.publisher import Publisher
from rl.weights.subscriber import Subscriber

model, versions, generators = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def came_in() -> int:
    return int(Path("/proc/self/net/dev").read_text().partition("e0:")[2].split()[0])


def learn(split: Split) -> None:
    publisher = Publisher(Learner(model, LearnerArgs(), split.ranks, total_steps=1), split, torch.float32)
    board = ControlBlock(split)
    split.store.get("ready")
    for version in range(versions):
        publisher.publish(version)
        board.update(version=version)
    publisher.wait()


def generate(split: Split) -> None:
    engine = TransformersEngine(model, max_length=64)
    board, subscriber = ControlBlock(split), Subscriber(split, engine)
    size = subscriber.plan.offsets[-1] * subscriber.plan.dtype.itemsize
    before = came_in()
    dist.barrier()  # the learner begins when all have looked
    if split.ranks.is_main:
        split.store.set("ready", "")
    for version in range(versions):
        board.wait_for(version)
        subscriber.receive(version)
    dist.barrier()
    if split.is_first_here:
        print(f"{came_in() - before} bytes came for {size}", flush=True)


process.run(lambda split: (learn if split.role == "learner" else generate)(split), join=lambda: init_split(generators))

"""Measures learners' host memory, in bytes per parameter. Prints a line of JSON.

python tests/programs/memory.py SMALL MODEL OUT         of one, at its start, in a step, a publish and saves
torchrun ... tests/programs/memory.py MODEL FLAGS       of each, as it loads its model, and publishes in bf16

A learner of SMALL imports what any learner imports. FLAGS: JSON.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed
from transformers import AutoTokenizer

import train_sync
from rl.checkpoint import saver
from rl.learning.args import LearnerArgs
from rl.learning.learner import Learner
from rl.ranks import dist, host, launch, process
from rl.ranks.gathering import BUCKET_BYTES
from rl.split import Split
from rl.weights.publish import Publisher


def resident(word: str) -> int:
    """VmRSS (now) or VmHWM (the most since `Peak` began) of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(word))


class Peak:
    """Resident memory inside `with Peak() as peak`: peak.added is the most above the start, peak.kept the rest at the end."""

    def __enter__(self) -> "Peak":
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident("VmRSS")
        return self

    def __exit__(self, *_) -> None:
        self.added, self.kept = resident("VmHWM") - self.before, resident("VmRSS") - self.before


def step(learner: Learner) -> None:
    for parameter in learner.policy.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def publish(learner: Learner, ranks: dist.Ranks, dtype: torch.dtype) -> Publisher:
    """Copy the weights as for the first publish."""
    nodes, bridge = [launch.Node("here", 0, ranks.world_size + 1, 1)], object() if ranks.is_main else None
    split = Split("learner", ranks, ranks.world_size, 1, nodes, 0, torch.distributed.HashStore(), bridge)
    publisher = Publisher(learner, split, dtype)
    publisher.take_copy()
    return publisher


def of_each(ranks: dist.Ranks) -> None:
    with Peak() as load:
        learner = Learner(sys.argv[1], LearnerArgs(**json.loads(sys.argv[2])), ranks, total_steps=10)
    with Peak() as sent:
        publish(learner, ranks, torch.bfloat16)
    sizes = [p.numel() for p in learner.policy.parameters()]
    own = {"load": load.added, "kept": load.kept, "publish": sent.added}
    own |= {"tensor": 4 * max(sizes), "bucket": max(BUCKET_BYTES, 2 * max(sizes))}
    everyone = dist.all_gather_values({name: size / sum(sizes) for name, size in own.items()})
    if ranks.is_main:
        print(json.dumps(everyone))


def of_one(ranks: dist.Ranks) -> None:
    small, model, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    step(Learner(small, LearnerArgs(), ranks, total_steps=10))
    tokenizer = AutoTokenizer.from_pretrained(model)
    said, peaks = [], {}
    with Peak() as peaks["start"]:
        learner = Learner(model, LearnerArgs(), ranks, total_steps=10)
    parameters = sum(p.numel() for p in learner.policy.parameters())
    with Peak() as peaks["step"]:
        step(learner)
    with Peak() as peaks["publish"]:
        publisher = publish(learner, ranks, torch.float32)  # noqa: F841  (it has the copy)
    job = SimpleNamespace(tokenizer=tokenizer, prompts=SimpleNamespace(prep=None))
    run = SimpleNamespace(dir=out, say=said.append)
    writer = saver.Saver(train_sync.Args(), job, run, {}, learner, None)
    available, host.available_memory = host.available_memory, lambda: 0
    for number, name in enumerate(["short", "short again", "first", "second", "last"], start=5):
        if name == "first":
            host.available_memory = available
        with Peak() as peaks[name]:
            writer.save(number, {})
            writer.wait()
        assert not writer.error, writer.error
    shares = {name: [peak.added / parameters, peak.kept / parameters] for name, peak in peaks.items()}
    print(json.dumps({"parameters": parameters, "bytes": shares, "said": said}))


if __name__ == "__main__":
    process.run(lambda ranks: (of_each if ranks.world_size > 1 else of_one)(ranks))
